"""Every error a user can meet: one sentence that says what was wrong, the value, what to do."""


class SlipstreamError(Exception):
    """Base of all errors meant for the user; the CLI prints them and exits with `exit_code`."""

    exit_code = 1
    http_status = 500


class InvalidRequest(SlipstreamError):
    """A prompt or sampling value that cannot be served. Other requests are unharmed."""

    exit_code = 2
    http_status = 400


class InvalidConfig(SlipstreamError):
    """An unknown name, key or value in a drafter spec, grid file or command line."""

    exit_code = 2
    http_status = 400


class ModelError(SlipstreamError):
    """A model that is missing, corrupt, truncated, or does not fit its partner."""

    exit_code = 3


class NumericalError(SlipstreamError):
    """The target produced NaN or infinite logits for a request; that request alone ends."""

    exit_code = 4


class LedgerError(SlipstreamError):
    """The ledger could not be written or read; what was already written is kept."""

    exit_code = 5
