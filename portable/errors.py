"""Errors of `portable`: each message says what was asked, what was found, and what to do next."""

from __future__ import annotations


class PortableError(Exception):
    """Base class of every error that `portable` raises itself."""


class BackendNotFound(PortableError, LookupError):
    """A backend name that no installed plugin provides."""


class BackendUnavailable(PortableError, RuntimeError):
    """A known backend that cannot run on this machine; the message holds the reason and the next step."""


class DeviceIndexError(PortableError, IndexError):
    """A device index outside ``range(device_count())``."""


class UnsupportedError(PortableError, NotImplementedError):
    """A function of the device API that a backend does not have.

    Attributes:
        backend: name of the backend that was asked.
        function: name of the function, as in ``torch.cuda``.
        reason: why the backend has no such function.
        alternative: what to call or do instead.
    """

    def __init__(self, backend: str, function: str, reason: str, alternative: str) -> None:
        super().__init__(backend, function, reason, alternative)
        self.backend = backend
        self.function = function
        self.reason = reason
        self.alternative = alternative

    def __str__(self) -> str:
        return (
            f"{self.function} is not available on the {self.backend} backend: {self.reason.rstrip('.')}. "
            f"Instead: {self.alternative.rstrip('.')}."
        )


class PluginError(PortableError, TypeError):
    """A plugin that returned something other than what its hook specifies."""


class ConfigurationError(PortableError, ValueError):
    """An option or environment variable whose value cannot be used."""
