"""Predict a corpus for `packcorpus.check`, in a process of its own.

python -P -m packcorpus.predict '["corpus.yaml", ".", 2, []]' ─▶ the fields of a Prediction as JSON
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from pydantic import TypeAdapter

from packcorpus.tasks.config import load_config
from packcorpus.tasks.core.messages import as_json, to_pack_error
from packcorpus.tasks.dry_run.prediction import Prediction
from packcorpus.tasks.stores.urls import root_of


@cache
def adapters() -> dict[str, TypeAdapter[Any]]:
    """Return what reads and writes each field as JSON, except the caller's settings."""
    types = get_type_hints(Prediction) | {"lengths": list[int]}
    return {name: TypeAdapter(kind) for name, kind in types.items() if name not in ("config", "recipe")}


def fields_from(content: bytes) -> dict[str, Any]:
    """Return the fields of a Prediction that `main` has printed."""
    fields = {name: adapters()[name].validate_python(value) for name, value in json.loads(content).items()}
    return fields | {"lengths": np.array(fields["lengths"], np.int64)}


def main(words: str) -> int:
    """Print the prediction, or the error as JSON on stderr; return the exit code."""
    from packcorpus.tasks.dry_run.dry_run import predict

    path, root, workers, batches = json.loads(words)
    try:
        config = load_config(Path(path))
        prediction = predict(config, Path(path).parent, root_of(root), workers, batches=batches)
    except Exception as error:
        failure = to_pack_error(error)
        print(as_json(failure), file=sys.stderr)
        return failure.exit_code
    values = vars(prediction) | {"lengths": prediction.lengths.tolist()}
    print(json.dumps({name: adapter.dump_python(values[name], mode="json") for name, adapter in adapters().items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
