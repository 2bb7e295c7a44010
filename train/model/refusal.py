"""Report an error of the code of a model as a reason not to train it.

first passes of a model ─named─▶ DataError with the class of the model and what failed, instead of an unexpected error
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from packcorpus.tasks.core.errors import DataError, PackError
from packcorpus.tasks.core.process import limit_reached
from packcorpus.train.machine.process import first_line, may_be_shortage
from packcorpus.train.machine.ranks import of_lost_rank


@contextmanager
def named(model: Any, what: str = "a pass in training") -> Iterator[None]:
    """Raise DataError if `what` fails in this block with an error of any library.

    Errors of this project, of the machine, and of lost ranks stay as they are.
    """
    try:
        yield
    except PackError:
        raise
    except Exception as error:  # each model has its own way to fail
        if may_be_shortage(error) or limit_reached(error) or of_lost_rank(error) is not error:
            raise
        config, text = model.config, f"{type(error).__name__}: {first_line(error)}"
        kind = (config.architectures or [type(model).__name__])[0]
        raise DataError(
            "unfit_model", f"{kind} ({config.model_type}) cannot be trained: {what} fails ({text}); use another model"
        ) from error
