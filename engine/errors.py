"""What the engine refuses, in words an operator or a client can act on."""


class EngineError(Exception):
    """Base of every error the engine raises on purpose."""


class ModelLoadError(EngineError):
    """A model cannot be loaded; the message names the file and the next step, on one line."""


class UnsupportedArchitectureError(ModelLoadError):
    """The model's architecture is not one the decoder can express; the message names it."""


class TemplateError(EngineError):
    """The chat template cannot render these messages; the message says what it objected to."""


class BadLogits(EngineError):
    """No token can be chosen from one row of logits. `row` is its index in the batch."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row


class LogitsNotFinite(BadLogits):
    """The model's own numbers have failed: the KV that led to them is not to be trusted either."""

    def __init__(self, row: int) -> None:
        super().__init__(row, "the model's logits are not finite")
