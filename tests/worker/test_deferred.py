"""Deferred packages of torch: what is asked of them before they are loaded, and how they work once they are."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

Check = Callable[[str], None]
#: Runs each line of its standard input, a text in JSON, in a fork of its own, as what is imported stays.
SERVER = """if True:
    import json, os, sys, traceback
    from honed.worker import deferred
    deferred.defer(deferred.ALL)
    import torch
    import torch._dynamo, torch.distributed.tensor, sympy
    from torch.distributed.tensor import DTensor
    def is_loaded(name):
        return not isinstance(sys.modules[name], deferred.Deferred)
    assert not any(is_loaded(package.name) for package in deferred.ALL if package.name in sys.modules)
    for line in sys.stdin:
        if os.fork() == 0:
            said = ""
            try:
                exec("if True:" + json.loads(line), globals())
            except BaseException:
                said = traceback.format_exc()
            os.write(1, json.dumps(said).encode() + b"\\n")
            os._exit(0)
        if status := os.wait()[1]:
            print(json.dumps(f"it ended with {status}"), flush=True)
"""


@pytest.fixture(scope="module")
def check() -> Iterator[Check]:
    """A function that runs code in a process where the packages are deferred, and fails with its traceback."""
    command = [sys.executable, "-c", SERVER]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None

    def run(code: str) -> None:
        server.stdin.write(json.dumps(code) + "\n")  # type: ignore[union-attr]
        server.stdin.flush()  # type: ignore[union-attr]
        said = json.loads(server.stdout.readline())  # type: ignore[union-attr]
        assert not said, said

    yield run
    server.kill()
    server.wait()


def test_steps_checkpointing_and_meta_tensors_load_nothing(check: Check) -> None:
    check("""
    from torch.utils.checkpoint import checkpoint
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    checkpoint(layer, torch.ones(2, 4, requires_grad=True), use_reentrant=False).sum().backward()
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    optimizer.step()
    with torch.device("meta"):
        assert torch.nn.Embedding(4, 4).weight.shape == (4, 4) and torch.arange(0, 8, 2).shape == (4,)
    assert not isinstance(layer.weight, DTensor) and not isinstance(layer.weight, sympy.Basic)
    assert not isinstance(layer, torch._dynamo.eval_frame.OptimizedModule)
    assert not is_loaded("torch._dynamo") and not is_loaded("torch.distributed.tensor") and not is_loaded("sympy")
    assert not is_loaded("torch.fx.experimental.symbolic_shapes") and "torch._inductor" not in sys.modules
    """)


def test_the_compiler_loads_at_its_first_use_and_heeds_earlier_marks(check: Check) -> None:
    check("""
    @torch.compiler.disable
    def left_alone(x):
        return torch.compiler.is_compiling()

    @torch.compiler.allow_in_graph
    def opaque(x):
        return x + 1

    assert left_alone.__name__ == "left_alone" and left_alone(1) is False and not is_loaded("torch._dynamo")
    graphs = []
    def backend(graph, _inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward
    found = []
    def whole(x):
        y = opaque(x) * 2
        found.append(left_alone(x))
        return y
    assert torch.equal(torch.compile(whole, backend=backend)(torch.ones(3)), torch.full((3,), 4.0))
    assert is_loaded("torch._dynamo") and is_loaded("torch.fx.experimental.symbolic_shapes")
    assert found == [False] and opaque in graphs[0], (found, graphs)
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    assert isinstance(compiled, torch._dynamo.eval_frame.OptimizedModule)
    assert torch._dynamo.disable.__module__ == "torch._dynamo.decorators"
    """)


def test_a_distributed_tensor_is_one_for_those_that_have_asked_before(check: Check) -> None:
    check("""
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    made = torch.distributed.tensor.distribute_tensor(torch.ones(4), mesh)
    from torch.distributed.tensor import DTensor as real
    assert real is not DTensor and isinstance(made, DTensor) and issubclass(real, DTensor)
    assert not isinstance(torch.ones(4), DTensor) and DTensor.from_local == real.from_local
    dist.destroy_process_group()
    """)


@pytest.mark.parametrize("first", ["torch._inductor.utils", "torch._dynamo.utils", "torch.distributed.tensor._api"])
def test_a_module_of_a_package_can_be_the_first_to_be_imported(check: Check, first: str) -> None:
    check(f"""
    import importlib
    importlib.import_module({first!r})
    assert is_loaded("torch._dynamo") or is_loaded("torch.distributed.tensor")
    """)


def test_symbols_work_once_they_are_used(check: Check) -> None:
    check("""
    import pickle
    from torch.fx.experimental.symbolic_shapes import guard_or_false, sym_eq
    assert guard_or_false(True) is True and sym_eq((1, 2), torch.Size([1, 2])) and not is_loaded("sympy")
    x = sympy.Symbol("x")
    assert is_loaded("sympy") and isinstance(x, sympy.Basic) and pickle.loads(pickle.dumps(x)) == x
    exported = torch.export.export(
        torch.nn.Linear(2, 2), (torch.ones(3, 2),), dynamic_shapes=({0: torch.export.Dim("rows")},)
    )
    assert exported.module()(torch.ones(7, 2)).shape == (7, 2)
    """)


def test_a_name_that_a_package_lacks_is_an_attribute_error(check: Check) -> None:
    check("""
    assert not hasattr(sympy, "__wrapped__") and not is_loaded("sympy")
    assert not hasattr(sympy, "no_such_name")
    """)


def test_threads_that_use_a_package_at_once_wait_until_it_is_loaded(check: Check) -> None:
    check("""
    import threading
    found, start = [], threading.Barrier(4)
    def use():
        start.wait()
        found.append(sympy.Symbol("x") + torch._dynamo.config.cache_size_limit)
    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1
    """)


def test_a_failure_to_load_is_the_package_s_own_and_the_next_use_tries_again(check: Check) -> None:
    check("""
    sys.modules["mpmath"] = None
    for _ in range(2):
        try:
            sympy.Symbol
        except ImportError as error:
            assert "mpmath" in str(error), error
        else:
            raise AssertionError
    del sys.modules["mpmath"]
    assert str(sympy.Symbol("x")) == "x" and is_loaded("sympy")
    """)


def test_a_package_that_loads_another_is_there_once(check: Check) -> None:
    check("""
    torch.compile(lambda x: x + 1, backend=lambda graph, _inputs: graph.forward)(torch.ones(2))
    inductor = sys.modules["torch._inductor"]
    assert inductor is torch._inductor and inductor.utils is sys.modules["torch._inductor.utils"]
    assert inductor.__spec__.loader is inductor.__loader__
    """)
