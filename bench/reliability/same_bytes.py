"""Check that two checkouts write the same shards, indexes, and plans.

    python bench/reliability/same_bytes.py OTHER_CHECKOUT [--corpora FOLDER] [--tokenizer FILE]

Each checkout needs its own .venv (`make test` creates it). Both pack the bundled sample and, if given, the source files
in FOLDER: at four sequence lengths, with each overlong policy, with mixtures, epochs, a Jinja template, and format 2.0.
Prints one line per corpus, and exits with 1 if a file differs. Texts (rejects, dataset card, manifest) are not
compared.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (512, 1024, 2048, 4096)
JINJA = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ (m.content or '') + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ (m.content or '') + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
COMPARED = (".arrow",)


def cases(corpora: Path | None, tokenizer: Path | None) -> dict[str, dict[str, Any]]:
    """Return the configs to compare, by name.

    Paths in the configs are absolute.
    """
    sample = ROOT / "data" / "sample"
    own = yaml.safe_load((sample / "corpus.yaml").read_text())
    entries = [entry if isinstance(entry, dict) else {"path": entry} for entry in own["sources"]]
    entries = [entry | {"path": str(sample / entry["path"])} for entry in entries]
    base = own | {"sources": entries}
    # At 128, many conversations have no trained token left.
    found = {f"sample-{length}": base | {"sequence_length": length, "max_rejects": 0.5} for length in (128, 1024)}
    found["sample-2.0"] = base | {"packing": False}
    found["sample-epochs"] = base | {"epochs": 3, "validation": 0.1, "sequence_length": 256, "overlong": "split"}
    if corpora is None:
        return found
    paths = sorted(str(path) for path in corpora.iterdir() if ".json" in path.name)
    base = {"tokenizer": str(tokenizer)} if tokenizer else {"vocab_size": 8192}
    base |= {"name": "shared", "sources": [{"path": path} for path in paths], "max_rejects": 0.05}
    for length in LENGTHS:
        found[f"corpora-{length}"] = base | {"sequence_length": length, "overlong": "drop"}
    found["corpora-split"] = base | {"overlong": "split", "train_on": "all"}
    found["corpora-last"] = base | {
        "overlong": "truncate",
        "train_on": "last",
        "validation": 0.03,
        "template": "llama2",
    }
    weights = [0.5, 2.5, 1, 1.25, 3, 0.25, 1, 1]
    for weighting in ("repeat", "subsample", "token_share"):
        sources = [
            {"path": path, "weight": min(weight, 1) if weighting == "subsample" else weight}
            for path, weight in zip(paths, weights, strict=False)
        ]
        sources[0]["limit"] = 300
        found[f"corpora-{weighting}"] = base | {
            "sources": sources,
            "weighting": weighting,
            "duplicates": "drop",
            "epochs": 2,
            "validation": 0.02,
            "min_tokens": 8,
        }
    found["corpora-jinja"] = base | {"template": "template.jinja", "max_rejects": 1.0}
    found["corpora-2.0"] = base | {"packing": False}
    return found


def digests(checkout: Path, config: dict[str, Any]) -> dict[str, str]:
    """Pack `config` with the code of `checkout`, and return checksums by file name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "corpus.yaml").write_text(yaml.safe_dump(config))
        (folder / "template.jinja").write_text(JINJA)
        luigi = checkout / ".venv" / "bin" / "luigi"
        words = [str(luigi), "--module", "pipeline", "PackCorpus", "--config", "corpus.yaml", "--quiet"]
        done = subprocess.run(
            words, cwd=folder, env=os.environ | {"PYTHONPATH": str(checkout)}, capture_output=True, text=True
        )
        if done.returncode:
            return {"failed": f"exit code {done.returncode}: {done.stderr.strip()[-500:]}"}
        files = [path for part in ("corpora", "plans") for path in sorted((folder / "data" / part).rglob("*"))]
        # The name of a plan's folder depends on the versions of its inputs, which may differ.
        return {
            f"{path.relative_to(folder / 'data').parts[0]}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
            if path.suffix in COMPARED
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout, with a .venv of its own")
    parser.add_argument("--corpora", type=Path, help="a folder with source files")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer for these files; by default, a tokenizer is trained")
    parser.add_argument("--only", default="", help="only the cases whose name contains this")
    given = parser.parse_args()
    failures = 0
    corpora = given.corpora.resolve() if given.corpora else None
    tokenizer = given.tokenizer.resolve() if given.tokenizer else None
    for name, config in cases(corpora, tokenizer).items():
        if given.only not in name:
            continue
        here, there = digests(ROOT, config), digests(given.other.resolve(), config)
        different = [file for file in sorted(here.keys() | there.keys()) if here.get(file) != there.get(file)]
        failures += bool(different) or "failed" in here
        result = f"DIFFERENT: {', '.join(different)}" if different else f"{len(here)} files are identical"
        if "failed" in here or "failed" in there:
            result = f"FAILED: {here.get('failed', '')} {there.get('failed', '')}"
        print(f"{name:24} {result}", flush=True)
    return min(1, failures)


if __name__ == "__main__":
    sys.exit(main())
