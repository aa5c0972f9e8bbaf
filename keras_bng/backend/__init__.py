"""How to do the same fast: one module a backend, the same few functions in each.

Nothing outside of this folder asks which backend runs, or imports one. `common` is
plain `keras.ops`; a module has its own of what its backend does better or otherwise:

- the norms of all blocks, `block_norms`, and their factors times the gradients, `times`
  (the plain twins of both are in `normalize.py`);
- `update`, the step of a known base optimizer in one pass. Its plain twin is that
  optimizer's own `update_step`. `docs/how.md` has the table of which has what;
- how a step called eagerly is compiled;
- what the tools need in order to look into a step.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import keras

from keras_bng.backend import common


def _module() -> Any:
    name = f"{__name__}.{keras.backend.backend()}"
    return importlib.import_module(name) if importlib.util.find_spec(name) else common


def __getattr__(name: str) -> Any:
    """Nothing: what there is, is put in here below. For type checkers."""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_OF_THIS_BACKEND = _module()
for _of_module in (common, _OF_THIS_BACKEND):
    globals().update(
        {name: x for name, x in vars(_of_module).items() if not name.startswith("_")}
    )
