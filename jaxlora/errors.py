"""Errors a person can act on. Each message is one line that names the file and the thing."""


class JaxloraError(Exception):
    """Base of every error this project raises for a user's mistake.

    Command line entry points print it as one line and exit with status 2.
    """


class ConfigError(JaxloraError):
    """A config.json or an option asks for something that is not served."""


class CheckpointError(JaxloraError):
    """A weight file is missing, truncated, or does not hold what its config promises."""


class AdapterError(JaxloraError):
    """An adapter is refused: nothing of it may be applied in part, or ignored."""


class CapacityError(JaxloraError):
    """What was asked for does not fit in the memory or slots fixed at start."""
