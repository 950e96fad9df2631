"""The errors that a user can cause, with the exit code that each ends the command line with."""


class QuantMLAError(Exception):
    """A fault that one sentence explains: names the value and what is allowed."""

    exit_code = 1


class UsageError(QuantMLAError):
    """Flags, a recipe or an argument that cannot be meant."""

    exit_code = 2


class UnsupportedModel(QuantMLAError):
    """A model that we do not handle, with the reason."""

    exit_code = 3


class QualityGateFailed(QuantMLAError):
    """The result is whole but worse than the gate allows."""

    exit_code = 4


def require(condition: bool, message: str, error: type[QuantMLAError] = QuantMLAError) -> None:
    """Raises `error(message)` unless `condition` holds; for a user's values, not our invariants."""
    if not condition:
        raise error(message)


def one_line(error: BaseException) -> str:
    """Another library's error as the end of our sentence."""
    said = " ".join(str(error).split())[:300]
    if said and isinstance(error, KeyError):  # whose text is the bare key
        said = f"there is no {said}"
    return said or type(error).__name__
