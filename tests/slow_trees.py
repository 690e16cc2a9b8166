"""Copies of this tree in which one thing is really slower, to see whether a gate calls it by its leg.

    python tests/slow_trees.py FOLDER         # FOLDER/pageable, .../sync, compute, bytes, item
    overlap gate --against . ...              # run from one of them, or: cd FOLDER/sync && ... --against THIS_TREE

The program itself has no such hook: each copy differs from it by the lines below.
"""

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
WORKLOADS = Path("harness") / "workloads"

# What is replaced, by name. In h2d: pageable memory where the key says pinned; the host waits for the device after
# every chunk; 5 % of the rows multiplied twice; 5 % of the rows copied twice. In ddp: a value is read in every block.
CHANGES = {
    "pageable": [
        ("self._allocate(profile, pinned=memory == \"pinned\")", "self._allocate(profile, pinned=False)"),
    ],
    "sync": [
        (
            "            backend.gemm(slot, self._weights, out)\n            if not same",
            "            backend.gemm(slot, self._weights, out)\n"
            "            backend.synchronize()\n            if not same",
        ),
    ],
    "compute": [
        (
            "                self._backend.gemm(slot, self._weights, out)\n        elif kind == \"serial\":",
            "                self._backend.gemm(slot, self._weights, out)\n"
            "                self._more(slot)\n        elif kind == \"serial\":",
        ),
        (
            "            backend.gemm(slot, self._weights, out)\n            if not same",
            "            backend.gemm(slot, self._weights, out)\n            self._more(slot)\n            if not same",
        ),
        (
            "    def _issue_transfer(",
            "    def _more(self, slot: Tensor) -> None:\n"
            "        rows = max(1, slot.shape[0] // 20)\n"
            "        if not hasattr(self, \"_scratch\"):\n"
            "            self._scratch = torch.empty_like(self._out[: self._out.shape[0] // 20 + 1])\n"
            "        self._backend.gemm(slot[:rows], self._weights, self._scratch[:rows])\n\n"
            "    def _issue_transfer(",
        ),
    ],
    "bytes": [
        (
            "            backend.copy(slot, source, stream)\n",
            "            backend.copy(slot, source, stream)\n"
            "            backend.copy(slot[: slot.shape[0] // 20], source[: slot.shape[0] // 20], stream)\n",
        ),
        (
            "            backend.copy(views.pieces[index][1], source, stream)\n",
            "            backend.copy(views.pieces[index][1], source, stream)\n"
            "            few = source.shape[0] // 20\n"
            "            backend.copy(views.pieces[index][1][:few], source[:few], stream)\n",
        ),
    ],
    "item": [
        (
            "        x = x + self.down(functional.gelu(self.up(self.norm_2(x))))\n        return x\n",
            "        x = x + self.down(functional.gelu(self.up(self.norm_2(x))))\n"
            "        x.mean().item()\n        return x\n",
        ),
    ],
}  # fmt: skip
FILES = {"item": WORKLOADS / "models.py"}


def make(name: str, folder: Path) -> Path:
    """The copy called `name`, with its change."""
    root = folder / name
    shutil.copytree(HERE / "harness", root / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    file = FILES.get(name, WORKLOADS / "h2d.py")
    text = (root / file).read_text()
    for old, new in CHANGES[name]:
        assert text.count(old) == 1, f"{file} has changed: {old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    (root / file).write_text(text)
    return root


if __name__ == "__main__":
    for name in CHANGES:
        print(make(name, Path(sys.argv[1])))
