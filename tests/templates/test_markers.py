"""Markers that the tokenizer lacks stop the run, unless they are text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.inspected import page_of, shown
from support.small_corpus import conversations, make_recipe, pack_corpus, write_project
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from packcorpus.tasks.config import Config, load_config
from packcorpus.tasks.core.errors import UsageError
from packcorpus.tasks.corpus.summary import notes
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.recipe import resolve
from packcorpus.tasks.storage.files import write_receipt
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.verification.rebuild import rebuild

# The special tokens of published tokenizers, as far as templates write them.
TOKENS = {
    "qwen3": "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <think> </think> <tool_call>",
    "llama2": "<s> </s> <unk>",  # and Mistral 1, Zephyr, OLMo: their templates write text
    "llama3": "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|python_tag|>",
    "mistral3": "<s> </s> <unk> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS]",
    "gemma": "<bos> <eos> <pad> <start_of_turn> <end_of_turn>",
    "gemma4": '<bos> <eos> <|turn> <turn|> <|channel> <channel|> <|"|>',
    "deepseek": "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <think> </think>",
    "gpt-oss": "<|start|> <|message|> <|end|> <|channel|> <|return|> <|call|> <|endoftext|>",
    "phi3": "<|endoftext|> <|system|> <|user|> <|assistant|> <|end|>",
    "glm4": "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>",
    "exaone": "[BOS] [|endofturn|] [|system|] [|user|] [|assistant|]",
    "minimax": "]~!b[ ]~b] [e~[",
    "falcon3": "<|endoftext|> <|system|> >>QUESTION<<",
}  # fmt: skip

LOOP = "{% for m in messages %}{% if m.role == 'user' %}USER{% else %}ANSWER{% endif %}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}OPEN{% endif %}"


def written(user: str, opens: str, end: str, begin: str = "", unused: str = "") -> str:
    """Return a template of user messages, and answers from `opens` to `end`.

    The markers in `unused` are only written for images.
    """
    images = f"{{% if m.content is not string %}}{unused}{{% endif %}}" * bool(unused)
    turns = LOOP.replace("USER", f"{user.replace('X', '{{ m.content }}')}{images}")
    turns = turns.replace("ANSWER", f"{opens}{{{{ m.content }}}}{end}")
    return begin + turns + PROMPT.replace("OPEN", opens)


TEMPLATES = {
    "qwen3": written(
        "<|im_start|>user\nX<|im_end|>\n",
        "<|im_start|>assistant\n",
        "<|im_end|>\n",
        "{% if tools %}<tools></tools><tool_call>{% endif %}",
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "llama2": written("{{ bos_token }}[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nX [/INST]", " ", " {{ eos_token }}"),
    "llama3": written(
        "<|start_header_id|>user<|end_header_id|>\n\nX<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "{% if m.tool_calls %}<|python_tag|>{% endif %}<|eot_id|>",
        "{{ bos_token }}",
    ),
    "mistral3": written(
        "[INST] X[/INST]", " ", "{% if m.tool_calls %}[TOOL_CALLS]{% endif %}{{ eos_token }}", "{{ bos_token }}"
    ),
    "gemma": written(
        "<start_of_turn>user\nX<end_of_turn>\n", "<start_of_turn>model\n", "<end_of_turn>\n", "{{ bos_token }}"
    ),
    "gemma4": written("<|turn>user\nX<turn|>\n", "<|turn>model\n", "<turn|>\n"),
    "deepseek": written("<｜User｜>X", "<｜Assistant｜></think>", "<｜end▁of▁sentence｜>"),
    "gpt-oss": written(
        "<|start|>user<|message|>X<|end|>", "<|start|>assistant", "<|return|>"
    ).replace("{{ m.content }}<|return|>", "<|channel|>final<|message|>{{ m.content }}<|return|>"),
    "phi3": written("<|user|>\nX<|end|>\n", "<|assistant|>\n", "<|end|>\n"),
    "glm4": written("<|user|>\nX", "<|assistant|>\n", "\n<|user|>", "[gMASK]<sop>"),
    "exaone": written("[|user|]X\n", "[|assistant|]", "[|endofturn|]\n"),
    "minimax": written("]~b]user\nX[e~[\n", "]~b]ai\n", "[e~[\n"),
    "zephyr": written("<|user|>\nX{{ eos_token }}\n", "<|assistant|>\n", "{{ eos_token }}\n"),
    "falcon3": written("<|user|>\nX\n", "<|assistant|>\n", "<|endoftext|>\n"),
    "alpaca": written("### Instruction:\nX\n\n", "### Response:\n", "{{ eos_token }}\n"),
    "thinks": written("<user>X</user>", "<think>\n\n</think>\n\n<answer>", "</answer>{{ eos_token }}"),
}  # fmt: skip

# Tokenizers for which a template writes no marker in vain, besides its own.
FITS = {
    "llama2": {*TOKENS},  # [INST] and <<SYS>> are text, also for Llama 2
    "zephyr": {*TOKENS},  # <|user|> is text, also for Zephyr
    "alpaca": {*TOKENS},
    "thinks": {*TOKENS},
    "phi3": {"phi3"},
    "falcon3": {"falcon3", "qwen3", "gpt-oss", "phi3", "glm4"},  # those with <|endoftext|>
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tokenizer_of(tmp_path_factory.mktemp("t") / name, tokens.split()) for name, tokens in TOKENS.items()}


def tokenizer_of(folder: Path, tokens: Sequence[str]) -> Path:
    """Write a tokenizer of bytes with these special tokens, and return its folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    end = next((token for token in tokens if token == "<|endoftext|>"), "<!end>")
    ends = {"eos_token": end, "pad_token": "<!pad>"}
    if end == "<!end>":  # like Qwen's, the tokenizers with <|endoftext|> have no BOS
        ends["bos_token"] = "<!begin>"
    special = [
        token for token in dict.fromkeys((*ends.values(), *tokens)) if "think" not in token and "tool" not in token
    ]
    model.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    model.add_tokens([token for token in tokens if token not in special])
    folder.mkdir()
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(ends), encoding="utf-8")
    return folder


@pytest.mark.parametrize("tokenizer", TOKENS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_fits_its_tokenizer(template: str, tokenizer: str, folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(TEMPLATES[template], encoding="utf-8")
    recipe = make_recipe(
        tmp_path, conversations(3), template="own.jinja", tokenizer=str(folders[tokenizer]), max_rejects=1.0
    )
    if tokenizer in FITS.get(template, {template}):
        manifest = load_manifest(pack_corpus(recipe))
        assert "unknown_markers" not in manifest.noticed
        return
    with pytest.raises(UsageError) as caught:
        pack_corpus(recipe)
    assert caught.value.reason == "unknown_marker"
    assert "chat.jsonl:1: the template own.jinja writes " in str(caught.value)
    assert f"but the tokenizer {tokenizer} has no such tokens" in str(caught.value)


@pytest.mark.parametrize(
    ("template", "tokenizer", "fits"),
    [
        ("chatml", "qwen3", True),
        ("chatml", "llama2", False),
        ("llama2", "llama2", True),
        ("llama2", "qwen3", True),
        ("llama3", "llama3", True),
        ("llama3", "qwen3", False),
        ("zephyr", "llama2", True),
        ("alpaca", "gemma", True),
        ("plain", "gemma", True),
        ("mistral", "mistral3", True),
        ("mistral", "llama2", False),
        ("chatml", None, True),  # trained with the markers of the template
        ("mistral", None, True),
    ],
)
def test_a_built_in_template_fits_its_tokenizer(
    template: str, tokenizer: str | None, fits: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    path = None if tokenizer is None else str(folders[tokenizer])
    recipe = make_recipe(
        tmp_path, conversations(60), template=template, tokenizer=path, vocab_size=400, sequence_length=1024
    )
    if fits:
        pack_corpus(recipe)
        return
    with pytest.raises(UsageError, match=f"the template {template} writes ") as caught:
        pack_corpus(recipe)
    assert caught.value.reason == "unknown_marker"


SAYS_MARKERS = {
    "messages": [
        {"role": "user", "content": "What is <|eot_id|>, and <｜User｜>? <|im_st"},
        {"role": "assistant", "content": "art|> It ends a turn: <|eot_id|>, <|python_tag|>, [TOOL_CALLS]"},
    ]
}


def test_markers_in_content_are_content(folders: dict[str, Path], tmp_path: Path) -> None:
    for name, template in (
        ("own", TEMPLATES["qwen3"]),
        ("both", TEMPLATES["qwen3"] + "{# <|eot_id|> <|python_tag|> #}"),
    ):
        folder = tmp_path / name
        write_project(folder, [])
        (folder / "own.jinja").write_text(template, encoding="utf-8")
        settings = {"default_system": "Write <｜User｜> and <|python_tag|>."}
        recipe = make_recipe(
            folder, [SAYS_MARKERS] * 3, template="own.jinja", tokenizer=str(folders["qwen3"]), **settings
        )
        pack_corpus(recipe)
    # Texts and recorded ids are packed without the template.
    recipe = make_recipe(tmp_path, [{"text": "A text."}] * 9, template="chatml", tokenizer=str(folders["llama2"]))
    pack_corpus(recipe)


def test_a_marker_counts_if_it_is_written(folders: dict[str, Path], tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Ulm"}}}
    turns = [{"role": "user", "content": "Ulm?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    source = TEMPLATES["qwen3"].replace(
        "{{ m.content }}<|im_end|>\n{% endif %}",
        "{% if m.tool_calls %}<|call|>{{ m.tool_calls[0].function | tojson }}{% endif %}{{ m.content }}<|im_end|>\n"
        "{% endif %}",
    )
    for calls in (False, True):
        folder = tmp_path / str(calls)
        write_project(folder, [])
        (folder / "own.jinja").write_text(source, encoding="utf-8")
        records = [*conversations(400), *[{"messages": turns}] * calls]
        settings: dict[str, Any] = {"template": "own.jinja", "tokenizer": str(folders["qwen3"])}
        if not calls:
            pack_corpus(make_recipe(folder, records, **settings))
            continue
        with pytest.raises(UsageError, match=r"chat.jsonl:401: the template own.jinja writes <\|call\|> like"):
            pack_corpus(make_recipe(folder, records, **settings))
        manifest = load_manifest(pack_corpus(make_recipe(folder, records, **settings, unknown_markers="text")))
        assert manifest.noticed["unknown_markers"] == {"<|call|>": {"conversations": 1}}


def test_markers_as_text_are_counted_and_shown(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(TEMPLATES["llama3"], encoding="utf-8")
    settings: dict[str, Any] = {"template": "own.jinja", "tokenizer": str(folders["qwen3"]), "sequence_length": 512}
    config = write_project(tmp_path, conversations(40), **settings)
    with pytest.raises(UsageError, match=r"<\|start_header_id\|>, <\|end_header_id\|> and <\|eot_id\|>"):
        predict(load_config(config), tmp_path, tmp_path)
    config = write_project(tmp_path, conversations(40), unknown_markers="text", **settings)
    counts = {"conversations": 40}
    markers = {"<|end_header_id|>": counts, "<|eot_id|>": counts, "<|start_header_id|>": counts}
    assert predict(load_config(config), tmp_path, tmp_path).noticed["unknown_markers"] == markers
    published = pack_corpus(recipe := resolve(config, tmp_path))
    manifest = load_manifest(published)
    assert manifest.noticed["unknown_markers"] == markers
    line = (
        "the template writes markers that the tokenizer lacks, so they are encoded as text: "
        "<|end_header_id|> in 40 conversations, <|eot_id|> in 40 conversations, <|start_header_id|> in 40 "
        "conversations (unknown_markers: text)"
    )
    assert f"note: {line}" in [*notes(manifest)]
    assert line in " ".join(shown(published).split())
    assert "encoded as text: &lt;|end_header_id|&gt; in 40" in page_of(published, tmp_path / "report.html")
    # With the default, the token files of this run are not enough.
    config = write_project(tmp_path, conversations(40), **settings)
    with pytest.raises(UsageError, match=r"own.jinja writes <\|end_header_id\|>"):
        pack_corpus(again := resolve(config, tmp_path))
    assert again.token_keys == recipe.token_keys


def test_token_files_of_earlier_versions_are_checked(folders: dict[str, Path], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"tokenizer": str(folders["llama2"]), "sequence_length": 512}
    recipe = make_recipe(tmp_path, conversations(40), unknown_markers="text", **settings)
    pack_corpus(recipe)
    for key in recipe.token_keys:
        path = recipe.layout.token_receipt(key)
        receipt = json.loads(path.read_text())
        del receipt["unknown_markers"]
        write_receipt(path, receipt)
    with pytest.raises(UsageError, match=r"chat.jsonl:1: the template chatml writes"):
        pack_corpus(make_recipe(tmp_path, conversations(40), **settings))


def test_a_corpus_of_an_earlier_version_can_be_rebuilt(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"tokenizer": str(folders["llama2"]), "sequence_length": 512}
    with monkeypatch.context() as patch:
        patch.setattr(Config, "checked_tokenizer", "")
        published = pack_corpus(make_recipe(tmp_path, conversations(40), **settings))
    assert "identical" in rebuild(published, tmp_path / "corpus.yaml")
