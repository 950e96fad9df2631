"""What the system refused, as one sentence: a full disk, a missing permission; no fault of ours."""

import errno


def disk_is_full(error: Exception) -> bool:
    """safetensors and torch report a full disk as errors of their own, with the system's words."""
    code = error.errno if isinstance(error, OSError) else None
    return code in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)


def system_fault(error: Exception) -> str:
    """What the system refused, and where; no fault of ours."""
    full = disk_is_full(error)
    reason = "no space left on device" if full else getattr(error, "strerror", None) or str(error)
    place = getattr(error, "filename", None)
    return f"{reason}: {place}" if place else reason
