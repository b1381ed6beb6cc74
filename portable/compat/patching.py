"""Replacing attributes and putting every one back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from portable.compat.imports import Imports
from portable.errors import UnsupportedError

if TYPE_CHECKING:
    from portable.compat.target import Target

_ABSENT = object()


class Patches:
    """A stack of replaced attributes. `undo` restores the very objects that were there, in reverse order."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any]] = []
        self._undo: list[Callable[[], None]] = []
        self._imports = Imports()

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name``; attributes that the owner only inherited are deleted again by `undo`."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._done.append((owner, name, before))

    def later(self, action: Callable[[], None]) -> None:
        """Do something more at the end."""
        self._undo.append(action)

    def when_imported(self, module: str, action: Callable[[], None]) -> None:
        """Do something when a module of PyTorch has been imported, which may be now."""
        self._imports.when_imported(module, action)

    def owners(self) -> list[tuple[Any, str]]:
        """What is replaced now."""
        return [(owner, name) for owner, name, _ in self._done]

    def originals(self) -> dict[int, Any]:
        """The id of each replacement to what it stands for; for attributes that were the owner's own."""
        return {id(vars(owner)[name]): before for owner, name, before in self._done if before is not _ABSENT}

    def undo(self) -> None:
        """Put everything back."""
        self._imports.forget()
        while self._done:
            owner, name, before = self._done.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        while self._undo:
            self._undo.pop()()


def truthful_to_torch(original: Any, answer: Any) -> Any:
    """The program is told what it needs to hear; PyTorch's own code, which would act on it, gets the truth.

    TorchInductor, for one, asks torch.cuda for the architecture to compile for.
    """

    @functools.wraps(original)
    def asked(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():  # which could not trace a look at the stack
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller == "torch" or caller.startswith("torch."):
                return original(*args, **kwargs)
        return answer(*args, **kwargs)

    # Compiled code asks for the current stream while Dynamo watches; if it compiled this frame, that would ask again, for ever.
    from torch._dynamo.eval_frame import skip_code

    skip_code(asked.__code__)  # type: ignore[attr-defined]
    return asked


def refuse(construct: str, target: Callable[[], Target]) -> Any:
    """A function that raises: what it stands for reaches into CUDA itself."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        here = target()
        here.note("no equivalent", construct, "raised UnsupportedError")
        raise UnsupportedError(
            here.backend.spec.name,
            construct,
            "it reaches into CUDA itself and has no counterpart",
            "leave the call out on this backend, or guard it with torch.version.cuda",
        )

    refused.__name__ = construct.rpartition(".")[2]
    return refused


def stand_in(original: type, make: Callable[..., Any], also: tuple[type, ...] = (), name: str = "") -> type:
    """A class in the place of another one that cannot be subclassed or changed, to translate its constructor's arguments.

    Args:
        original: the class; its instances, made before or by PyTorch itself, are instances of the stand-in too.
        make: what calling the stand-in does. Classes that the program derives from it are built as usual.
        also: other classes whose instances count.
        name: the name under which programs know it.
    """

    class Kind(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, (original, *also)) if cls is made else type.__instancecheck__(cls, instance)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, (original, *also)) if cls is made else type.__subclasscheck__(cls, kind)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs) if cls is made else type.__call__(cls, *args, **kwargs)

    attributes = {"__module__": original.__module__, "__doc__": original.__doc__}
    made = Kind(name or original.__name__, (original,), attributes)
    return made


def like(original: Any, wrapper: Any, module: str, name: str) -> Any:
    """Give a wrapper the looks of what it replaces, so that it pickles by name and shows the same signature and help."""
    functools.update_wrapper(wrapper, original)
    wrapper.__module__, wrapper.__name__, wrapper.__qualname__ = module, name.rpartition(".")[2], name
    return wrapper
