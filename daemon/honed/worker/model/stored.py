"""The tensors of a base model's files, read one at a time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from honed.inputs import basemodel
from honed.inputs.basemodel import QUANTIZATION_STATE


class Base:
    """The stored tensors by name. The files are memory-mapped, so that a tensor takes memory only while it is used."""

    def __init__(self, path: Path, model_type: str) -> None:
        info = basemodel.inspect(path, model_type=model_type)
        self.path = path
        self.tensors = {tensor.name: tensor for tensor in info.tensors if not QUANTIZATION_STATE.search(tensor.name)}
        self._state = {tensor.name for tensor in info.tensors} - set(self.tensors)
        self._quantization = info.quantization
        self._places = self._index()
        self._files: dict[Path, Any] = {}

    def _index(self) -> dict[str, Path]:
        single = self.path / "model.safetensors"
        if single.exists():
            return dict.fromkeys([*self.tensors, *self._state], single)
        index = json.loads((self.path / "model.safetensors.index.json").read_bytes())
        return {name: self.path / file for name, file in index["weight_map"].items()}

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Keep the files open inside the context."""
        from safetensors import safe_open

        with contextlib.ExitStack() as stack:
            for path in sorted(set(self._places.values())):
                self._files[path] = stack.enter_context(safe_open(path, framework="pt"))
            yield
        self._files.clear()

    def read(self, name: str) -> Any:
        """Read a tensor; bitsandbytes' quantized ones are returned in float32."""
        if self.tensors[name].dtype not in ("uint8", "int8") or self._quantization is None:
            return self._get(name)
        module = name.removesuffix(".weight")
        if f"{module}.SCB" in self._state:
            return self._get(name).float() * self._get(f"{module}.SCB").float()[:, None] / 127.0
        from bitsandbytes.functional import QuantState, dequantize_4bit

        state = {item: self._get(item) for item in self._state if item.startswith(f"{name}.")}
        return (
            dequantize_4bit(self._get(name), QuantState.from_dict(state, device="cpu")).float()
            if state
            else self._get(name)
        )

    def is_quantized(self, name: str) -> bool:
        """Return True if the tensor is a weight that bitsandbytes has quantized."""
        return (
            self._quantization is not None
            and name.endswith(".weight")
            and self.tensors[name].dtype in ("uint8", "int8")
        )

    def _get(self, name: str) -> Any:
        return self._files[self._places[name]].get_tensor(name)
