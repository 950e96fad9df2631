"""Parts of a run that a later one takes over, known to be as they were written.

A digest stands in the file: what was cut off, edited or put under another name is named and not
taken, so that whoever reads a part need not ask after its keys, types and shapes.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from quantmla.errors import QuantMLAError, require
from quantmla.workdir import write_whole


def tensors_of(path: Path) -> Path:
    """The safetensors file that belongs to a part."""
    return path.with_suffix(".safetensors")


def write_kept(path: Path, content: Any, tensors: bytes | None = None) -> None:
    """Writes a part as JSON. Its `tensors`, where it has some, go first: the JSON finishes it."""
    if tensors is not None:
        write_whole(tensors_of(path), tensors)
    sha = _digest(path, content, tensors)
    whole = {"sha256": sha, "tensors": tensors is not None, "content": content}
    write_whole(path, json.dumps(whole).encode())


def read_kept(path: Path) -> Any:
    """The content. QuantMLAError where it, or the part's tensors, are not as they were written."""
    try:
        whole = json.loads(path.read_bytes())
        tensors = tensors_of(path).read_bytes() if whole["tensors"] is True else None
        content = whole["content"]
        intact = whole["sha256"] == _digest(path, content, tensors)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        intact, content = False, None
    require(
        intact,
        f"{path} is damaged or has been changed: remove this file to make it again with --resume",
        QuantMLAError,
    )
    return content


def _digest(path: Path, content: Any, tensors: bytes | None) -> str:
    sha = hashlib.sha256(f"{path.name}\0{json.dumps(content)}\0".encode())
    if tensors is not None:
        sha.update(hashlib.sha256(tensors).digest())
    return sha.hexdigest()
