"""Every family of the zoo through honed's real worker: see scripts/torture, and tests/promises.py for what is tried.

    torture_families.py [FAMILY[,FAMILY…]] [--results FILE] [--write PAGE] [--minutes M]

Prints what each family keeps; status 1 where a promise is broken. With `--results` each family's result is a line of
that file, and families that have one there are not tried again.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from zoo.families import FAMILIES, PROMISES

NOT_TRIED = "not tried"
#: Codes of errors with which honed refuses what it cannot do.
REFUSALS = (
    "refused",
    "spec_invalid",
    "model_invalid",
    "dataset_invalid",
    "precision_mismatch",
    "mask_invalid",
    "loss_mismatch",
)
KINDS = {
    "dense": "text",
    "experts": "text, mixture of experts",
    "recurrent": "text, recurrent or hybrid",
    "vision": "images and text",
}
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")
PAGE = """# Families of models

`scripts/torture --families` makes a tiny model of each family below (random weights, with each kind of layer that the
family has), trains it with the real worker and compares the result with another computation: {date}, on a CPU, with
{versions}. The test run tries some of them (`tests/worker/test_family_promises.py`). Of {total} families {tried} were
tried, and {count} keep all seven promises:

- **resumed**: full fine-tuning, killed with SIGKILL and resumed, has the losses and, bit for bit, the weights of an
  undisturbed run.
- **best**: `load_best_model_at_end` gives the weights of a run that ends at the best step, bit for bit.
- **divided**: four rows of unequal length, as a batch of 4, as 2 of 2 and as 4 of 1, have the same gradient: each
  element within 0.1 % of the tensor's largest.
- **merged**: `kind: merge` writes a model with the logits of the adapter (`target_modules: all-linear`) on its base.
- **exported**: full fine-tuning in float32 writes a model that transformers opens without missing or surplus tensors,
  and with the logits of the trained model.
- **bfloat16**: the same for a base stored in bfloat16, with the logits of transformers' own cast.
- **adapted**: the adapter, opened by PEFT, has the logits of the trained model.

The other computation runs in a process without honed. Logits are equal, or differ by at most 1e-5 in float32 and 2
units in the last place in bfloat16; a merge by twice what PEFT's own merge in memory differs. Models with images are
trained on text. Families are the `model_type` of `config.json`; numbers refer to the remarks at the end. `xlstm` is
missing: transformers' kernels for CPUs do not train it at these widths.
{tables}

## Remarks

{remarks}
"""


def word(result: str) -> str:
    """Return the entry of the table for a result."""
    if result == NOT_TRIED:
        return "–"
    if result.startswith("holds"):
        return "yes" if result == "holds" else "yes\\*"
    return "refused" if result.startswith(REFUSALS) else "no"


def exceptions(family: str, promises: Mapping[str, str]) -> list[str]:
    """Return a line for each thing to say of a family, with the promises that it is said of."""
    said: dict[str, list[str]] = {}
    for promise in PROMISES:
        if promises[promise] not in ("holds", NOT_TRIED):
            said.setdefault(promises[promise], []).append(promise)
    return [f"- `{family}`, {', '.join(names)}: {text}" for text, names in said.items()]


def page(results: Mapping[str, Mapping[str, str]], *, date: str, versions: str) -> str:
    remarks: dict[str, int] = {}
    tables = []
    for kind, title in KINDS.items():
        tables += ["", f"## {title.capitalize()}", "", "| family | exceptions |", "|---|---|"]
        for family in (name for name, (its_kind, _) in FAMILIES.items() if its_kind == kind):
            tables.append(f"| `{family}` | {exceptions_of(results[family], remarks)} |".replace("  ", " "))
    return PAGE.format(
        date=date,
        versions=versions,
        count=sum(all(each.startswith("holds") for each in results[family].values()) for family in FAMILIES),
        tried=sum(NOT_TRIED not in results[family].values() for family in FAMILIES),
        total=len(FAMILIES),
        tables="\n".join(tables),
        remarks="\n".join(f"{number}. {text}" for text, number in remarks.items()) or "None.",
    )


def exceptions_of(promises: Mapping[str, str], remarks: dict[str, int]) -> str:
    """Return the exceptions of a family, each with the number of its remark; new remarks are added."""
    kept: dict[str, list[str]] = {}
    for promise in PROMISES:
        if (result := promises[promise]) != "holds":
            kept.setdefault(result, []).append(promise)
    return ", ".join(
        f"{'all' if len(names) == len(PROMISES) else ', '.join(names)}: {remarks.setdefault(result, len(remarks) + 1)}"
        for result, names in kept.items()
    )


def read(lines: Iterable[str]) -> dict[str, dict[str, str]]:
    found = [json.loads(line) for line in lines]
    return {each["family"]: each["promises"] for each in found if each["promises"]}


def until(end: float, left: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield the results of families, as long as it is not later than that."""
    if not left or time.monotonic() > end:
        return
    from promises import of_each

    with contextlib.closing(of_each(left)) as tried:
        for result in tried:
            yield result
            if time.monotonic() > end:
                return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="?", help="separated by commas; by default all")
    parser.add_argument("--results", type=Path, help="a file of results, which is continued")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no family later than this")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the page, docs/families.md")
    options = parser.parse_args()
    names = options.families.split(",") if options.families else list(FAMILIES)
    if unknown := sorted({*names} - FAMILIES.keys()):
        parser.error(f"no such family: {', '.join(unknown)}")
    if options.write and {*names} != {*FAMILIES}:
        parser.error("--write: a page is of all families")
    results = read(options.results.read_text().splitlines()) if options.results and options.results.exists() else {}
    left = {each: PROMISES for each in names if each not in results}
    for name, found, seconds in until(time.monotonic() + 60 * options.minutes, left):
        results[name] = found
        print(f"{name}: {seconds:.0f} s", *exceptions(name, found), sep="\n", flush=True)
        if options.results:
            with options.results.open("a") as file:
                file.write(json.dumps({"family": name, "promises": found}) + "\n")
    results |= {name: dict.fromkeys(PROMISES, NOT_TRIED) for name in names if name not in results}
    if options.write:
        from honed.system import installed

        today = datetime.datetime.now(datetime.UTC).date()
        versions = ", ".join(f"{each} {installed.version(each)}" for each in PACKAGES)
        options.write.write_text(page(results, date=str(today), versions=versions))
    broken = [name for name in names if any(word(each) == "no" for each in results[name].values())]
    tried = [name for name in names if set(results[name].values()) != {NOT_TRIED}]
    print(f"{len(tried) - len(broken)} of {len(tried)} families that were tried keep what is promised or are refused")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
