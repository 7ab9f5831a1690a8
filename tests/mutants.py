"""`make mutants`: changes one place of the library at a time, and expects the test that is named beside it to fail.

    python -m tests.mutants [WORD ...]       only the mutations whose file or test contains one of the words

Works on copies of the tracked files, one for each core. Each test is first run unchanged and must pass. Fails unless
every mutation is caught. `tests/test_house.py` checks that every mutation finds its text once and leaves a file that
Python reads.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent


class Mutation(NamedTuple):
    """A deliberate fault; in `TABLE` a line ``old => new`` below ``## file :: arguments of pytest``."""

    file: str
    old: str
    """Text that occurs once in the file."""
    new: str
    test: str
    """Arguments of pytest."""


TABLE = r"""
## dmt/plan/topology.py :: tests/dmt/test_plan.py
return ranks.reshape(*sizes, self.num_replicas).transpose(2, 0, 1) => return ranks.reshape(self.num_replicas, *sizes)
self._groups(0, 2, 1, size=self.num_towers) => self._groups(0, 1, 2, size=self.num_towers)
return rank // self.host_size => return rank % self.host_size
## dmt/sharding/plan_tables.py :: tests/dmt/test_tower_sharding.py -k hard
sorted(ranks) if scheme in EVERYWHERE else ranks => sorted(ranks)
## dmt/sharding/schemes.py :: tests/dmt/test_tower_sharding.py -k copies
if self.hot_rows and obstacles.get("column_wise") == "": => if False:
## dmt/replicas/dense_reduce.py :: tests/dmt/test_parity.py -m "not slow" -k "host-4"
gradients / (self._inside.size() * self._across.size()) => gradients / self._inside.size()
gradients.copy_(end()) => end()
## dmt/replicas/sync.py :: tests/dmt/test_parity.py -m "not slow" -k "replicas-4"
self._steps % self.interval == 0 => self._steps % self.interval == 1
self._states.start()\n        self._weights.finish() => self._states.start()
## dmt/replicas/sync.py :: tests/dmt/test_parity.py -m "not slow" -k "replicas-6"
mean + (live - snapshot) => mean - (live - snapshot)
## dmt/replicas/sync.py :: tests/dmt/test_replicas.py -k a_replica_that_differs
if value != everyone[0][name] => if value != theirs[name]
if not self.delays_states: => if False:
## dmt/replicas/sync.py :: tests/dmt/test_replicas.py -k what_is_loaded_is_not_mixed
self._set_drifted(self.delays_states and => self._set_drifted(False and
self._states.forget() => pass
module.flush()\n        for part in => pass\n        for part in
## dmt/sptt/peer_exchange.py :: tests/dmt/test_peer_exchange.py -k rows_go_to_their_samples
gradients.div_(len(ctx.transfer.sizes)) if get => gradients if get
self._pending.wait()\n => pass\n
zip(blocks, transfer.shapes, strict=True) => zip(blocks[::-1], transfer.shapes, strict=True)
shape[-1] for shape in transfer.shapes] => shape[-1] for shape in transfer.shapes[::-1]]
## dmt/sptt/tower_lookup.py :: tests/dmt/test_parity.py -m "not slow" -k "towers-3"
sums.values() / ctx.divisor => sums.values() * ctx.divisor
.clamp(min=1) for key in => .clamp(min=2) for key in
lambda rows: rows[: sizes[self._rank]] => lambda rows: rows[: sizes[0]]
## dmt/sptt/group_sharded.py :: tests/dmt/test_parity.py -m "not slow" -k "sequences-4"
self.adapt(optimizer)\n\n    def input => pass\n\n    def input
ctx.is_filled_up = features.stride() == 0 => ctx.is_filled_up = False
lambda sequences: split_rows(sequences, [0, 1])[0] => lambda sequences: sequences
{key: of_key[i] for key, of_key in blocks.items()} => {key: of_key[0] for key, of_key in blocks.items()}
lengths=torch.cat(lengths), weights => lengths=torch.cat(lengths[::-1]), weights
moment_scaled(fused_settings(weights[name], fused_params), scale) => fused_settings(weights[name], fused_params)
## dmt/sptt/dataflow.py :: tests/dmt/test_parity.py -m "not slow" -k "towers-4"
[of_peer[0] for of_peer in rows.arrived] => [of_peer[0] for of_peer in rows.arrived[::-1]]
## dmt/sptt/flat.py :: tests/dmt/test_parity.py -m "not slow" -k "outside and 4"
part_sizes(len(outside_B), len(arriving)) => part_sizes(len(outside_B), len(arriving))[::-1]
part, sharding, device, mesh=alone) => part, sharding, device, mesh=self.mesh)
## dmt/sptt/unique.py :: tests/dmt/test_pretended_gpu.py
torch.arange(num_samples, device=device) => torch.arange(num_samples)
## dmt/sptt/rows.py :: tests/dmt/test_pretended_gpu.py
numbers.to(ids.device()).unsqueeze => numbers.unsqueeze
## dmt/hot_rows/touched_sum.py :: tests/dmt/test_pretended_gpu.py
dtype=torch.uint8, device=bits.device) => dtype=torch.uint8)
## dmt/hot_rows/copies.py :: tests/dmt/test_pretended_gpu.py
(sizes.cumsum(0) - sizes).to(self._device) => (sizes.cumsum(0) - sizes)
## dmt/sharding/data_parallel.py :: tests/dmt/test_pretended_gpu.py
dtype=torch.float32, device=device) => dtype=torch.float32)
## dmt/training/agreement.py :: tests/dmt/test_pretended_gpu.py
self._since.to(finite.device) => self._since
## dmt/plan/towers.py :: tests/dmt/test_plan.py -k balanced
key=lambda tower: (sums[tower], len(towers[tower])) => key=lambda tower: len(towers[tower])
hosts.count(place)] => hosts.count(place) or True]
tuple(on_host[tower::num]) => tuple(on_host[tower:num:num])
counts[table.name] * table.embedding_dim => counts[table.name]
## dmt/sharding/outside.py :: tests/training/test_outside.py -k "hand or most"
if fits and left[tower_of[table.name]] > 1 and => if fits and
table.num_embeddings, counted) if => counted) if
total + needed <= _MEMORY_SHARE => needed <= _MEMORY_SHARE
## dmt/sptt/outside.py :: tests/dmt/test_parity.py -m "not slow" -k "outside and 2"
made.before_lookup = None => pass
## dmt/sptt/flat.py :: tests/dmt/test_refusals.py -k "feature and outside"
outside=feature_names(outside), => outside=[],
## dmt/sptt/id_routes.py :: tests/dmt/test_dataflow.py -k ids_arrive_in_peer_order
stagger=self._stagger => stagger=1
## dmt/training/checkpoints/store.py :: tests/training/checkpoints/test_layouts.py -k moments_of_two_replicas
tensor.mul_(factor) => tensor.div_(factor)
## dmt/training/checkpoints/state.py :: tests/training/checkpoints/test_restoring.py -k row_wise_state_is_cut
min(end, stop) - max(first, start) => stop - start
total += part.double() * number => total += part.double()
## dmt/training/checkpoints/store.py :: tests/training/checkpoints/test_restoring.py -k what_else
tensors={(mesh.rank, 0): generators}) => tensors={(0, 0): generators})
## dmt/training/checkpoints/state.py :: tests/training/checkpoints/test_layouts.py -k "lost and columns"
ranges[number].tensors[(row,)] = tensor => ranges[-1 - number].tensors[(row,)] = tensor
## dmt/training/checkpoints/store.py :: tests/training/checkpoints/test_saving.py -k not_finite
not all(_is_finite(tensor) for => all(_is_finite(tensor) for
## dmt/training/checkpoints/state.py :: tests/training/checkpoints/test_saving.py -k fails_on_any_rank
raise self._fault => pass
## dmt/training/checkpoints/state.py :: tests/training/checkpoints/test_saving.py -k on_the_disk_before
os.fsync(self.fileno()) => pass
self._sha256.update(view) => self._sha256.update(view[:1])
## dmt/training/checkpoints/store.py :: tests/training/checkpoints/test_folder.py
earlier[: keep - 1]] => earlier[keep - 1 :]]
is_whole = sha256_of(folder / name) == manifest.files[name] => is_whole = sha256_of(folder / name) != ""
if _order(path)[0] == step), default=0) => if _order(path)[0] != step), default=0)
## dmt/training/checkpoints/store.py :: tests/training/checkpoints/test_power_loss.py
doomed = path.with_name(f".{path.name}.partial") => doomed = path.with_name(f"{path.name}.partial")
## dmt/training/data/deal.py :: tests/training/data/test_clicks.py -k rows_are_used_once
np.minimum(rows.number, bounds % self.lanes) => np.minimum(rows.number + 1, bounds % self.lanes)
## dmt/training/train.py :: tests/training/test_health.py -k before_a_divergence
agreement.check(at.step) => pass
## dmt/training/train.py :: tests/training/test_stop.py -k differ_are_not
run.replicas.check() => pass
## dmt/training/serving/score.py :: tests/training/serving/test_score.py -k same_order
"group_by": None, "label": None} => "label": None}
## dmt/training/trained.py :: tests/training/test_resume.py -k another_encoding
if len({(config.vocabulary => if not len({(config.vocabulary
## dmt/training/agreement.py :: tests/training/test_stop.py -k same_steps
return is_regular or step >= self._next or => return is_regular or
## dmt/training/metrics.py :: tests/training/test_metrics.py -k time_of_steps
self.steps + 1, self.seconds + now - self._since => self.steps + 2, self.seconds + now
## dmt/training/data/batch.py :: tests/training/data/test_clicks.py -k become_inputs
(0, batch_size - at))) => (batch_size - at, 0)))
## dmt/training/data/files.py :: tests/training/data/test_clicks.py -k text_is_prepared_once
int(system.checksum(inner)) => 0
## dmt/training/data/source.py :: tests/training/data/test_source.py -k reading_goes_on
self._states and epoch == self._epoch else None => self._states else None
deque(), None => deque(), self.start_state
## dmt/training/data/columns.py :: tests/training/data/test_clicks.py -k divided
in names if name not in (config.label, config.split_column)] => in names]
## dmt/training/resume.py :: tests/training/test_resume.py -k from_the_weights
Start(folder=folder, lines=(f"weights => Start(lines=(f"weights
## dmt/training/data/prepare.py :: tests/training/data/test_prepare.py -k prepared_again
[FORMAT, eval_only, settings => [FORMAT, settings
## dmt/training/build.py :: tests/training/test_build.py -k union_of_their_batches
self.set_step(self.steps + 1) => self.set_step(self.steps)
## dmt/training/data/hash.py :: tests/test_house.py -k "docstring and hash"
rows = 1 + (mix_bits(hashed ^ salt) => rows = 1 + (mix_bits(hashed)
fill_null(0)) => fill_null(1))
## dmt/training/data/hash.py :: tests/training/data/test_prepare.py -k "frequen or vocabular or deal"
known = np.where(known_keys[place] == keys, known_rows[place], _RARE) => known = known_rows[place]
return _FIRST + len(self.keys) => return len(self.keys)
order = np.argsort(keys) => order = np.arange(len(keys))
## dmt/sptt/unique.py :: tests/dmt/test_unique.py -m "not slow and not ranks"
(is_first.cumsum(dim=1) - 1).gather(1, first) => is_first.cumsum(dim=1).gather(1, first)
begins[:, 1:] = hashes[:, 1:] != hashes[:, :-1] => begins[:, 1:] = hashes[:, 1:] > hashes[:, 1:]
kept = is_first[group_of].flatten() => kept = is_first[group_of].flip(0).flatten()
first = equal if _have_equal_inputs(ids, equal[group_of]) else first => first = equal
## dmt/sptt/unique.py :: tests/dmt/test_parity.py -m "not slow" -k "unique-4"
add_rows(held.gradients, ctx.places.flatten() => add_rows(held.gradients, ctx.places.flip(0).flatten()
torch.where(inverse < self._begins[k], shifts, self._shifts[k]) => self._shifts[k]
## dmt/hot_rows/copies.py :: tests/dmt/test_parity.py -m "not slow" -k "rows-4"
gradient.div_(self._whole.size()) => pass
part.home[part.rows] = part.copy[part.places] => part.home[part.rows] = part.copy[part.rows]
is_sender = home.is_replicated or self._module.mesh.local == 0 => is_sender = True
for tensor in self._tensors.values()] => for (_, part), tensor in self._tensors.items() if part == "weight"]
## dmt/hot_rows/copies.py :: tests/dmt/test_hot_rows.py -k changes_in_place
part.copy[part.places]\n        self._is_newer = False => part.copy[part.places]
## dmt/hot_rows/touched_sum.py :: tests/dmt/test_hot_rows.py -x -k touched_rows_are
touched = max_over_ranks(touched.to(torch.uint8), self._inside) => touched = touched.to(torch.uint8)
table.ne(0).any(1) => table.gt(0).any(1)
table[of_table] = summed.view => table[of_table] += summed.view
## dmt/sptt/peer_exchange.py :: tests/dmt/test_peer_exchange.py -k nobody_waits
                begun.wait() =>                 pass
## dmt/sptt/peer_exchange.py :: tests/dmt/test_peer_exchange.py -k tags_tell
tag=exchange.tag) => tag=0)
## dmt/sptt/micro_batches.py :: tests/dmt/test_parity.py -m "not slow" -k "micro-batches-4"
module.run_towers(part_PN, rows), number) => module.run_towers(part_PN, rows), 0)
## dmt/sptt/dataflow.py :: tests/dmt/test_unique.py -k outlive
if ctx.encoder is not self.encoder: => if False:
## dmt/sptt/dataflow.py :: tests/dmt/test_parity.py -m "not slow" -k "bits and train"
if not ctx.in_tower and ctx.request is not None: => if False:
## dmt/sptt/towers.py :: tests/dmt/test_parity.py -m "not slow" -k "towers-3"
total += sum_over_ranks(square, => total += 0 * sum_over_ranks(square,
## dmt/sharding/planner.py :: tests/dmt/test_planner.py -k sharder_decides
tables=dict(pinned or {}), hot_rows=hot_rows) => tables=dict(pinned or {}))
## dmt/sharding/costs.py :: tests/dmt/test_planner.py -k bytes
, cache=placement.cache_load_factor) => )
## dmt/sharding/costs.py :: tests/dmt/test_costs.py
returned = lookups if is_sequence(table) else samples * features => returned = samples * features
## dmt/plan/tables.py :: tests/dmt/test_refusals.py -k "sequences"
hasattr(table, "init_fn") and not hasattr(table, "pooling") => False
## dmt/training/data/clicks.py :: tests/training/serving/test_score_by_ranks.py -k keep_their_numbers
rows = -(-deal.num_rows // world_size) => rows = deal.num_rows // world_size
first, end = rank * rows, => first, end = 0,
## dmt/training/serving/score_by_ranks.py :: tests/training/serving/test_score_by_ranks.py -k keep_their_numbers
first_row=first_row, group => first_row=0, group
## dmt/sptt/state.py :: tests/dmt/test_hot_rows.py -k schedule
self.write_back()\n        for part in self.local_parts:\n            yield => for part in []:\n            yield
## models/dense.py :: tests/models/test_models.py -k on_meta
layers[:-1] if last_is_linear else layers => layers
## models/sparse.py :: tests/models/test_models.py -k pools_sequences
if isinstance(table, TableSpec) => if True
if is_sequence(table) is kind] for => if True] for
## models/sequences.py :: tests/models/test_tower_modules.py -k din
index_add(0, self.sample_J, self.values_JN) => index_copy(0, self.sample_J, self.values_JN)
lengths, output_size=num_items => lengths
scores_J - largest_B.index_select(0, sample_J) => scores_J
weights_J.unsqueeze(1) * items_JN => items_JN
## partitioner/problem.py :: tests/partitioner/test_blocks.py -k gains
np.fill_diagonal(pairs, 0.0) => pass
## partitioner/affinity.py :: tests/partitioner/test_affinity.py -k beyond_their_error
errors=None if self.errors is None else self.errors[np.ix_(index, index)] => errors=self.errors
## partitioner/rules.py :: tests/partitioner/test_rules.py -k order_of_the_model
rest = others | set(categories.get(REST, ())) => rest = others
## partitioner/search.py :: tests/partitioner/test_search.py
.T[:, labels] - between => .T[:, labels] + between
- 2.0 * self.bounds.apart[blocks] => - self.bounds.apart[blocks]
inside / float(weights[rows].sum()) if => inside / len(rows) if
self.triple_costs[(a == b) & (b == c)] => self.triple_costs[(a == b) | (b == c)]
## partitioner/points.py :: tests/partitioner/test_partitioner.py -x -m "not ranks and not slow"
1.0 - matrix if strategy == "coherent" => matrix if strategy == "coherent"
"""


def mutations() -> list[Mutation]:
    """The mutations of `TABLE`; ``\\n`` in a line is a line break."""
    found = []
    file = test = ""
    for line in TABLE.strip().splitlines():
        if line.startswith("## "):
            file, _, test = line.removeprefix("## ").partition(" :: ")
        else:
            old, _, new = line.replace("\\n", "\n").partition(" => ")
            found.append(Mutation(file, old, new, test))
    return found


def copy_of_the_tree(folder: Path) -> None:
    """Copies all tracked files, links included, as they are in the working tree."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)


def outcome_of(test: str, folder: Path) -> str:
    """Runs a test in the copy: ``"passed"``, ``"failed"``, ``"timed out"``, or ``"no verdict"`` if pytest could not."""
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(test)]
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return "timed out"  # A dropped wait may leave ranks waiting for one another; a busy machine looks the same.
    if done.returncode not in (0, 1):
        print(f"{test}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return "no verdict"
    return "failed" if done.returncode else "passed"


def verdict(mutation: Mutation, folder: Path) -> str:
    """Puts the fault into the copy, runs its test, and takes the fault out again."""
    path = folder / mutation.file
    text = path.read_text() if path.exists() else ""
    if text.count(mutation.old) != 1:
        return f"is there {text.count(mutation.old)} times"
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        outcome = outcome_of(mutation.test, folder)
        return {"passed": "missed", "failed": "caught"}.get(outcome, outcome)
    finally:
        path.write_text(text)


def main(words: list[str]) -> int:
    """Runs all mutations, one per core at a time; returns the number of those that no test catches."""
    chosen = [one for one in mutations() if not words or any(word in one.file or word in one.test for word in words)]
    start, caught = time.monotonic(), 0
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="dmt-mutants-") as name, ThreadPoolExecutor(cores) as pool:
        copies = SimpleQueue[Path]()
        for core in range(cores):
            copy_of_the_tree(Path(name, str(core)))
            copies.put(Path(name, str(core)))

        def in_a_copy(function: Callable[[Any, Path], str], case: Any) -> str:
            folder = copies.get()
            try:
                return function(case, folder)
            finally:
                copies.put(folder)

        tests = list(dict.fromkeys(one.test for one in chosen))
        outcomes = dict(zip(tests, pool.map(partial(in_a_copy, outcome_of), tests), strict=True))
        sound = [one for one in chosen if outcomes[one.test] == "passed"]
        for test, outcome in outcomes.items():
            if outcome != "passed":
                print(f"{test}: {outcome} without any fault", flush=True)
        verdicts = pool.map(partial(in_a_copy, verdict), sound)
        for number, (one, outcome) in enumerate(zip(sound, verdicts, strict=True), 1):
            caught += outcome == "caught"
            print(f"{number:3}/{len(sound)} {outcome}  {one.file}: {one.old!r} -> {one.new!r}", flush=True)
    print(f"{caught} of {len(chosen)} caught in {(time.monotonic() - start) / 60:.1f} minutes")
    return len(chosen) - caught


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
