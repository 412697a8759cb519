"""What wrappers launch, without a GPU: each distinct kernel with all that decides what the compiler makes of it."""

from __future__ import annotations

import hashlib
import io
import json
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.language import constexpr
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class NoDriver:
    """What a launch asks of a driver before it compiles. The device's number is its compute capability."""

    def __init__(self, sm: int) -> None:
        self.sm = sm

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.sm, 32)

    def get_current_device(self) -> int:
        return self.sm

    def get_current_stream(self, device: int = 0) -> int:
        return device

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel that has to be compiled."""

    kernel: Any
    sm: int
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attrs: dict[Any, Any]
    options: Any  # Triton's, for this target

    @property
    def name(self) -> str:
        return cast("str", self.kernel.fn.__name__)

    @property
    def types(self) -> dict[str, str]:
        """Of the pointers."""
        return {
            name.removesuffix("_ptr"): x[1:] for name, x in self.signature.items() if x[0] == "*"
        }

    @property
    def sizes(self) -> dict[str, Any]:
        """The constants by name."""
        named = {self.kernel.arg_names[at[0]]: plain(x) for at, x in self.constants.items()}
        return {name: x for name, x in named.items() if name != "INTERPRET"}

    @property
    def key(self) -> str:
        """Equal only where the compiler makes the same."""
        options = {name: x for name, x in vars(self.options).items() if name != "extern_libs"}
        return digest(
            triton.__version__, self.sm, source(self.kernel), sorted(self.signature.items()),
            sorted(self.sizes.items()), sorted(self.attrs.items()), sorted(options.items()),
        )  # fmt: skip


def plain(x: Any) -> Any:
    x = x.value if isinstance(x, constexpr) else x
    return x if isinstance(x, (int, float, str)) or x is None else str(x)


def digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]


def source(kernel: Any) -> str:
    """Digest of the kernel's code and of that which it calls, without comments and line breaks."""
    code: dict[str, list[str]] = {}
    todo = [kernel]
    while todo:
        function = todo.pop()
        name = function.fn.__qualname__
        if name in code:
            continue
        code[name] = words(function.src)
        for used in function.fn.__code__.co_names:
            value = function.fn.__globals__.get(used)
            if isinstance(value, JITFunction):
                todo.append(value)
            elif isinstance(value, constexpr):
                code[name].append(f"{used}={value.value!r}")
    return digest(sorted(code.items()))


def words(text: str) -> list[str]:
    """Python without comments, line breaks and the width of indents."""
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE)
    return [
        tokenize.tok_name[token.type] if not token.string.strip() else token.string
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in layout
    ]


def launches(run: Callable[[], None], sm: int) -> dict[str, Launch]:
    """The distinct kernels that `run` launches on a GPU of compute capability `sm / 10`, by their keys."""
    found: dict[str, Launch] = {}

    def keep(
        kernel: Any, _key: Any, signature: Any, _device: int, constants: Any, options: Any, attrs: Any, _warmup: bool
    ) -> None:  # fmt: skip
        launch = Launch(
            kernel=kernel, sm=sm, signature=signature, constants=constants, attrs=attrs, options=options
        )  # fmt: skip
        found.setdefault(launch.key, launch)

    compiler: Any = JITFunction
    compile_it = compiler._do_compile
    compiler._do_compile = keep  # that returns no kernel ends the launch
    driver.set_active(cast("Any", NoDriver(sm)))
    try:
        run()
    finally:
        compiler._do_compile = compile_it
    return found
