"""Methods that choose a layer's transform: one file each (docs/extending.md has the contract).

To add one: write the module, add its line here.
"""

import importlib
from dataclasses import fields
from typing import Any

from quantmla.errors import UsageError, require
from quantmla.quant.format import MOST_TOKENS

METHODS = {
    "rtn": "quantmla.method.rtn",
    "smoothquant": "quantmla.method.smoothquant",
    "quarot": "quantmla.method.quarot",
    "paper": "quantmla.method.paper",
    "identity": "quantmla.method.identity",
    "quantmla": "quantmla.method.quantmla",
}


def load_method(name: str) -> Any:
    """The method's module; UsageError names the known ones."""
    require(name in METHODS, f"unknown method {name!r}; known: {', '.join(METHODS)}", UsageError)
    return importlib.import_module(METHODS[name])


def options_for(name: str, values: dict[str, Any]) -> Any:
    """The method's Options with `values` set; unknown names and wrong types are UsageErrors."""
    options = load_method(name).Options
    known = {f.name: f.type for f in fields(options)}
    for key, value in values.items():
        require(
            key in known,
            f"method {name} has no option {key!r}; known: {', '.join(known) or 'none'}",
            UsageError,
        )
        wanted = type(getattr(options(), key))
        fits = isinstance(value, wanted) or (wanted is float and isinstance(value, int))
        require(
            fits and not (wanted is int and isinstance(value, bool)),
            f"option {key} of method {name} is {value!r}; it must be a {wanted.__name__}",
            UsageError,
        )
        least = 1 if wanted is int and not key.endswith("steps") else 0  # 0 steps leave a part out
        require(
            wanted not in (int, float) or least <= value <= MOST_TOKENS,
            f"option {key} of method {name} is {value!r}; it must be at least {least} and at most "
            f"{MOST_TOKENS}",
            UsageError,
        )
    return options(**values)
