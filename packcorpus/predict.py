"""Predict a corpus for `packcorpus.check`, in a process of its own.

python -P -m packcorpus.predict '["corpus.yaml", ".", 2, []]' ─▶ the pickled config and fields of a Prediction
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

from packcorpus.tasks.config import load_config
from packcorpus.tasks.core.messages import as_json, to_pack_error
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.stores.urls import root_of


def main(words: str) -> int:
    """Print the prediction, or the error as JSON on stderr; return the exit code."""
    path, root, workers, batches = json.loads(words)
    try:
        config = load_config(Path(path))
        prediction = predict(config, Path(path).parent, root_of(root), workers, batches=batches)
    except Exception as error:
        failure = to_pack_error(error)
        print(as_json(failure), file=sys.stderr)
        return failure.exit_code
    fields = {name: value for name, value in vars(prediction).items() if name not in ("config", "recipe")}
    sys.stdout.buffer.write(pickle.dumps((config, fields)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
