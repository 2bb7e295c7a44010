"""Name the path of every artifact below the project root."""

from __future__ import annotations

from pathlib import Path

# The Jinja templates of a corpus, next to its shards. The second one is for conversations with tools, if the tokenizer
# has such a template.
TEMPLATE, TOOL_TEMPLATE = "template.jinja", "tool_use.jinja"


class Layout:
    """Paths of all artifacts below the project root, without any file access."""

    def __init__(self, root: Path):
        self.root = root
        self._tokens = root / "data" / "tokens"  # named for every part, many times

    def outputs(self) -> list[Path]:
        """Return the folders that contain only outputs of runs, with links resolved."""
        names = ("tokenizers", "tokens", "engines", "digests", "plans", "corpora", "remote")
        folders = [*(self.root / "data" / name for name in names), self.root / "manifests"]
        return [folder.resolve() for folder in folders]

    def name_of(self, path: Path) -> str:
        """Return a path below the root as every machine can use it: relative to the root."""
        return path.relative_to(self.root).as_posix()

    def remote(self) -> Path:
        """Return the folder of the local copies of remote sources."""
        return self.root / "data" / "remote"

    def tokenizer(self, key: str) -> Path:
        return self.root / "data" / "tokenizers" / key[:12] / "tokenizer.model"

    def tokenizer_receipt(self, key: str) -> Path:
        return self.tokenizer(key).with_name("receipt.json")

    def token_file(self, key: str) -> Path:
        return self._tokens.joinpath(key[:2], f"{key}.arrow")

    def token_receipt(self, key: str) -> Path:
        return self._tokens.joinpath(key[:2], f"{key}.json")

    def engine(self, key: str) -> Path:
        return self.root / "data" / "engines" / f"{key}.json"

    def digests(self) -> Path:
        return self.root / "data" / "digests"

    def plan_folder(self, key: str) -> Path:
        return self.root / "data" / "plans" / key[:12]

    def lock(self, name: str, key: str) -> Path:
        return self.root / "data" / "plans" / f"{name}-{key[:12]}.lock"

    def corpus(self, name: str, key: str) -> Path:
        return self.root / self.corpus_name(name, key)

    @staticmethod
    def corpus_name(name: str, key: str) -> str:
        """Return the path of a corpus folder, relative to the project root."""
        return f"data/corpora/{name}-{key[:12]}"

    def published(self, name: str, key: str) -> Path:
        return self.root / "manifests" / f"{name}-{key[:12]}.json"
