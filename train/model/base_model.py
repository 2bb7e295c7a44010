"""Find the base model, and check that it fits the corpus.

config.base_model ─base_model─▶ a local folder or a Hugging Face name; for `toy`, a small Llama built here
base ─read_config─▶ model config ─┬─check_model─────▶ every id has an embedding, every row has positions
manifest ─────────────────────────┼─check_tokenizer─▶ the files of the model's tokenizer make the same tokens
texts of rows ────────────────────┴─check_rows──────▶ AutoTokenizer gives the same tokens

The small Llama has random weights drawn from the seed. It shows that everything works. An adapter can teach it only
which words are frequent, not their meaning.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import orjson
import torch
import transformers
from safetensors.torch import save
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from packcorpus.tasks.core.errors import DataError, InputMissing, PackError
from packcorpus.tasks.core.printable import shown
from packcorpus.tasks.encoders.auto_tokenizer import Comparison, compare, texts_in
from packcorpus.tasks.encoders.encoder import token_name
from packcorpus.tasks.encoders.native import read_spec, tokenizer_of
from packcorpus.tasks.encoders.sentencepiece_encoder import read_model
from packcorpus.tasks.encoders.tokenizer_files import (
    FETCHED,
    TOKENIZER_FILES,
    TokenizerFiles,
    find_tokenizer,
    find_tokenizer_files,
    forget_loaded,
    is_like_transformers,
    load_as_of,
    locate_tokenizer,
    open_found,
    similar_beside,
)
from packcorpus.tasks.storage.files import write_bytes
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.storage.shards import open_shard
from packcorpus.tasks.stores.hub import fetch_model
from packcorpus.tasks.stores.urls import Model
from packcorpus.train.config import TrainingConfig
from packcorpus.train.model import checkpoint
from packcorpus.train.model.quantization import check_stored

PARAMETERS = 23_000_000
# Two wide layers are a quarter faster on a CPU than four (attention is cheaper), and learn more in the same steps.
LAYERS = 2
POSITIONS = 4096


def silence_libraries() -> None:
    """Silence the libraries; our output has everything that matters to the user."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # it logs every attempt to reach a network
    for category in (FutureWarning, DeprecationWarning, UserWarning):
        warnings.filterwarnings("ignore", category=category)
    # PEFT applies the rank of experts, but warns because no layer matches it.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"peft\.")


# -- the small Llama ---------------------------------------------------------------------------------------------------


def small_llama(vocab_size: int, sequence_length: int) -> LlamaConfig:
    """Return the config of a Llama of about 23M parameters.

    It is as wide as 2 layers and the tied embeddings allow. The size is within 10 % for vocabularies from 300 to
    150,000. From about 180,000, the embeddings alone are that large.
    """
    fits = [h for h in range(128, 1024, 64) if vocab_size * h + LAYERS * 16 * h * h <= PARAMETERS]
    hidden = max(fits, default=128)
    # A layer has 4 h² in its attention and 3 h × wide in its MLP, wide being about 4 h.
    room = max(0, PARAMETERS - vocab_size * hidden)
    layers = max(LAYERS, round(room / (16 * hidden * hidden)))
    wide = max(2 * hidden, round((room / layers - 4 * hidden * hidden) / (3 * hidden) / 64) * 64)
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        # The model must accept rows longer than POSITIONS.
        max_position_embeddings=max(POSITIONS, sequence_length),
        # Random weights of this size preserve the scale of the activations. With the usual 0.02, an adapter can learn
        # little: in 20 steps of 2 rows of the sample, the loss falls from 8.5 to 6.5. With these, it falls from 8.9 to
        # 5.5.
        initializer_range=hidden**-0.5,
        tie_word_embeddings=True,
        # A model that was never trained has no special tokens.
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )


def build_small_llama(vocab_size: int, sequence_length: int, seed: int, folder: Path) -> Path:
    """Write the small Llama to `folder`/llama-23m-<digest>, unless it exists."""
    # config.json is written last and marks the model as complete. Equal arguments yield equal bytes.
    config = small_llama(vocab_size, sequence_length)
    described = orjson.dumps([orjson.loads(config.to_json_string()), seed], option=orjson.OPT_SORT_KEYS)
    with torch.device("meta"):
        millions = round(sum(p.numel() for p in LlamaForCausalLM(config).parameters()) / 1e6)
    path = folder / f"llama-{millions}m-{hashlib.sha256(described).hexdigest()[:12]}"
    if (path / "config.json").exists():
        return path
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    write_bytes(path / "model.safetensors", save(weights, {"format": "pt"}))
    write_bytes(path / "config.json", config.to_json_string().encode())
    return path


def base_model(config: TrainingConfig, vocab_size: int, sequence_length: int, folder: Path) -> Path | str:
    """Return the base model's folder, or its Hugging Face name."""
    named = config.base_model
    if named is None:
        return build_small_llama(vocab_size, sequence_length, config.seed, folder)
    path = Path(named).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise DataError(
                "bad_model", f"base_model: {named}: contains no config.json; use a folder written by save_pretrained"
            )
        return path
    # Names on the Hub have the form `model` or `owner/model`.
    if path.exists() or named.startswith((".", "/", "~")) or named.count("/") > 1:
        raise InputMissing(
            "model_missing",
            f"base_model: {named}: no such folder{similar_beside(path)}; use a folder with a model, or the name of a "
            "model on the Hub",
        )
    return named


def commit_of(base: Path | str) -> str | None:
    """Return the commit of a model on the Hub in the cache; None for a folder."""
    from huggingface_hub import try_to_load_from_cache

    found = None if isinstance(base, Path) else try_to_load_from_cache(base, "config.json")
    return Path(found).parent.name if isinstance(found, str) else None


# -- the contract ------------------------------------------------------------------------------------------------------


def read_config(base: Path | str) -> Any:
    """Read the config of a model that can be trained."""
    try:
        found = AutoConfig.from_pretrained(base, trust_remote_code=False)
        if not isinstance(found.architectures, list | None):
            raise TypeError(f"architectures in its config.json is {found.architectures!r}, and must be a list")
    except Exception as error:  # the code of each config checks it in its own way
        raise unreadable(base, error) from None
    check_stored(base, found)
    return found


def unreadable(base: Path | str, error: Exception) -> DataError | InputMissing:
    """Return a one-line error for a model that could not be loaded."""
    if found := checkpoint.obstacle(base, error):
        return DataError("bad_model", f"base_model: {base}: {'; '.join(found)}")
    reason = " ".join(str(error).split())[:300].rstrip(".")
    if isinstance(base, Path):
        return DataError(
            "bad_model", f"base_model: {base}: cannot be read ({reason}); copy the model again, or use another model"
        )
    return InputMissing(
        "model_missing",
        f"base_model: {base!r} is not a local folder{similar_beside(Path(str(base)))}; it could not be downloaded from "
        f"the Hub, either ({reason}); "
        "check the name and the network, or use a local folder",
    )


def positions(config: Any) -> int | None:
    """Return the length of the longest row that a model accepts; None if unlimited."""
    # With rope scaling, a config may contain the length before scaling. XLNet has -1, because it has no such length.
    longest = max(0, getattr(config, "max_position_embeddings", None) or 0)
    rope = getattr(config, "rope_parameters", None) or {}
    if longest and rope.get("factor"):
        scaled = rope["factor"] * (rope.get("original_max_position_embeddings") or longest)
        return max(int(scaled), longest)
    return longest if longest and longest > 0 else None


def check_model(base: Path | str, config: Any, max_id: int, sequence_length: int) -> None:
    """Raise DataError if a model is not a causal one, or lacks an ID or positions."""
    checkpoint.auto_class(base, config)
    config = config.get_text_config()
    if max_id >= config.vocab_size:
        raise DataError(
            "ids_beyond_model",
            f"the corpus has the id {max_id}, but {base} has embeddings only for ids up to {config.vocab_size - 1}; "
            "pack the corpus with that model's tokenizer, or use the model that this tokenizer belongs to",
        )
    longest = positions(config)
    if longest is not None and sequence_length > longest:
        raise DataError(
            "rows_beyond_model",
            f"rows have {sequence_length} tokens, but {base} has positions for {longest}; "
            f"pack the corpus with --sequence-length {longest}, or use a model that accepts longer rows",
        )


def check_tokenizer(manifest: Manifest, corpus: TokenizerFiles, config: TrainingConfig, base: Path | str) -> str:
    """Check that the model's tokenizer is the one that made the rows; return a note."""
    wanted = manifest.tokenizer.sha256
    place, path = config.tokenizer or base, tokenizer_path(config, base)
    if not config.tokenizer and not has_tokenizer(path):
        return f"tokenizer: {place} has none, so it was not compared with the corpus's"
    load_as = load_as_of(manifest)
    found = _tokenizers(path, corpus, load_as)
    if found and corpus.digest() in [files.digest() for files in found]:
        return f"tokenizer: {wanted[:12]}, the same in {place} and in the corpus"
    other = found[0] if found else find_tokenizer(path, load_as)  # one of another kind differs
    # An EOS that the corpus's config names replaces the EOS of the files.
    if differs := differences(corpus, other, compare_eos=not manifest.config.get("eos_token")):
        raise DataError(
            "other_tokenizer",
            f"the corpus was made with the tokenizer {wanted[:12]}, but {place} has a different tokenizer: "
            f"{'; '.join(differs)}; pack the corpus with that tokenizer, or set `tokenizer` to the file that the model "
            "is actually used with",
        )
    return f"tokenizer: {wanted[:12]}, the same in {place} and in the corpus, although their files differ"


def tokenizer_path(config: TrainingConfig, base: Path | str) -> Path:
    """Return the config's `tokenizer`, or else the folder of the base model."""
    if config.tokenizer:
        return locate_tokenizer(config.tokenizer, Path(config.tokenizer))[0]
    if isinstance(base, Path):
        return base
    try:
        return fetch_model(Model(base, ""), FETCHED)
    except PackError as error:
        raise unreadable(base, error) from None


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES[:2])


def _tokenizers(path: Path, corpus: TokenizerFiles, load_as: str) -> list[TokenizerFiles]:
    """Return the sets of files at `path` that a corpus may have used.

    A set is the main file alone, or the files of the folder. A folder often contains both kinds of tokenizer, and each
    kind counts with its own files. The main file alone does not count if AutoTokenizer loads the folder unlike it.
    """
    files, suffix = find_tokenizer(path, load_as), corpus.main.suffix
    if path.is_file():
        return [files] if files.main.suffix == suffix else []
    main = files.main if files.main.suffix == suffix else path / f"tokenizer{suffix}"
    if not main.is_file():
        return []
    if files.main == main and is_like_transformers(files.digest()):
        return [files]
    alone = TokenizerFiles(main, (main,))
    return [files, alone] if files.main == main else [alone]


# -- the same tokenizer ------------------------------------------------------------------------------------------------


def differences(corpus: TokenizerFiles, model: TokenizerFiles, compare_eos: bool = True) -> list[str]:
    """Describe each part that differs, with its first difference.

    Returns [] if the tokenizers are equal. The files are compared in the parts that decide which tokens a text becomes:
    vocabulary, merges or scores, added tokens, normalizer, pre-tokenizer, settings of the model, and the names of BOS
    and EOS. Chat template, padding, truncation, decoder, and the layout of the files do not matter, so a tokenizer
    stays equal if a library saves it again. The names of BOS and EOS are compared if the settings of both tokenizers
    have them. Raises DataError with the name of the file if a tokenizer cannot be read.
    """
    if _is_json(corpus) != _is_json(model):
        made, used = map(_kind, (corpus, model))
        return [f"the corpus has {made}, but the model has {used}, and a conversion may change tokens"]
    ours, theirs = _parts(corpus), _parts(model)
    found = [
        name if name in ("normalizer", "pre-tokenizer") else f"{name} ({_first_difference(part, theirs[name])})"
        for name, part in ours.items()
        if part != theirs[name]
    ]
    mine, yours = corpus.settings(), model.settings()
    for key in ("bos_token", "eos_token") if compare_eos else ("bos_token",):
        one, other = token_name(mine.get(key)), token_name(yours.get(key))
        if one and other and one != other:
            found.append(f"{key} ({shown(one)} in the corpus, {shown(other)} in the model)")
    return found


def _is_json(files: TokenizerFiles) -> bool:
    """Return whether a tokenizer is, or becomes, a tokenizer.json."""
    return files.like_transformers or files.main.suffix == ".json"


def _kind(files: TokenizerFiles) -> str:
    if files.main.suffix == ".json":
        return "a tokenizer.json"
    return "a SentencePiece model" + " that AutoTokenizer converts" * files.like_transformers


def _parts(files: TokenizerFiles) -> dict[str, Any]:
    """Return the tables and values of a tokenizer by their names in messages."""
    if _is_json(files):
        try:
            spec = files.loaded().spec if files.like_transformers else read_spec(files.main)
            # The library reads and writes it, so the version that wrote the file does not matter.
            spec = orjson.loads(tokenizer_of(spec, files.main).to_str())
        finally:
            forget_loaded()
        model = spec["model"]
        vocabulary = model.pop("vocab")
        # The vocabulary of a Unigram model is a list of pieces with scores.
        pieces = vocabulary if isinstance(vocabulary, dict) else {piece: n for n, (piece, _) in enumerate(vocabulary)}
        return {
            "vocabulary": pieces,
            "scores": {} if isinstance(vocabulary, dict) else dict(vocabulary),
            "merges": model.pop("merges", []),
            "added tokens": {token.pop("content"): token for token in spec["added_tokens"]},
            "normalizer": spec["normalizer"],
            "pre-tokenizer": spec["pre_tokenizer"],
            "model settings": model,
        }
    from sentencepiece import sentencepiece_model_pb2 as proto

    read = read_model(files.main)
    settings = ("model_type", "byte_fallback", "treat_whitespace_as_suffix", "unk_piece", "bos_piece", "eos_piece")
    rules = ("precompiled_charsmap", "add_dummy_prefix", "remove_extra_whitespaces", "escape_whitespaces")
    return {
        "vocabulary": {piece.piece: number for number, piece in enumerate(read.pieces)},
        "scores": {piece.piece: piece.score for piece in read.pieces},
        "types of pieces": {p.piece: proto.ModelProto.SentencePiece.Type.Name(p.type) for p in read.pieces},
        "normalizer": {rule: getattr(read.normalizer_spec, rule) for rule in rules},
        "model settings": {name: getattr(read.trainer_spec, name) for name in settings},
    }


def _first_difference(ours: Any, theirs: Any) -> str:
    """Describe the first difference of two tables, in the order of the first."""
    if isinstance(ours, Mapping):
        pairs = ((shown(key), ours.get(key), theirs.get(key)) for key in dict.fromkeys((*ours, *theirs)))
    else:
        pairs = ((f"number {number:,}", *pair) for number, pair in enumerate(zip_longest(ours, theirs)))
    (key, one, other), *rest = [pair for pair in pairs if pair[1] != pair[2]]
    more = f", and {len(rest):,} more" if rest else ""
    return f"{key}: {_value(one)} in the corpus, {_value(other)} in the model{more}"


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):  # an added token: its id and the flags that are set
        flags = [name for name, flag in value.items() if flag is True]
        return " ".join([str(value.get("id")), *flags])
    if isinstance(value, Sequence) and not isinstance(value, str):
        return shown(" ".join(map(str, value)))
    return shown(value) if isinstance(value, str) else str(value)


def compare_rows(manifest: Manifest, corpus: Path, tokenizer: Path) -> Comparison:
    """Compare the tokenizer of a corpus folder with AutoTokenizer of a folder.

    Nothing is compared if the corpus has no tokens. Raises the errors of find_tokenizer_files and open_shard.
    """
    shard = next((shard for split in manifest.splits.values() for shard in split.shards if shard.rows), None)
    if shard is None or not manifest.packing_metadata.enabled:
        return Comparison()
    encoder = open_found(manifest, find_tokenizer_files(manifest, corpus))
    with open_shard(manifest, corpus, shard) as batches:
        rows = next(iter(batches)).column("input_ids").slice(0, 64).to_pylist()
    return compare(encoder, tokenizer, texts_in(encoder, rows))


def check_rows(manifest: Manifest, corpus: Path, tokenizer: Path) -> str:
    """Return a note about the comparison.

    Raises DataError if a text differs, unless the corpus was made with a single file or with `as: files`: then the note
    says so.
    """
    found = compare_rows(manifest, corpus, tokenizer)
    if found.difference and not is_as_it_is(manifest, corpus):
        raise DataError(
            "other_tokenizer",
            f"{found.difference} ({tokenizer}); pack the corpus with that tokenizer or, if inference uses its file as "
            "it is, with `tokenizer: {path: FOLDER, as: files}`",
        )
    return described(found)


def is_as_it_is(manifest: Manifest, corpus: Path) -> bool:
    """Return whether a corpus uses the file of its tokenizer as it is."""
    return load_as_of(manifest) == "files" or len(find_tokenizer_files(manifest, corpus).files) == 1


def described(found: Comparison) -> str:
    problem = found.difference or found.failure
    return f"tokenizer: {problem}" if problem else f"tokenizer: {found.texts:,} texts have the tokens of AutoTokenizer"
