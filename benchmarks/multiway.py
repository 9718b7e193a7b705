"""What the exact contrastive loss over six modalities costs, forward and backward, compared with other ways.

D=512, every anchor against all B^5 combinations: an einsum to [B]^6, two halves and one matmul, Symile's enumeration of
the combinations for each anchor, and ours. Then the form that exchanges one vector (`fibre`), at B=8192. Peak memory is
what is added to the features; a way that does not fit is listed as out of memory. The last table shows the accuracy of
each precision of ours: the error of loss and gradients relative to float64. `--tune` times tile sizes instead.

    python benchmarks/multiway.py [--device cuda|cpu] [--quick] [--tune]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from machine import describe_machine, write_results
from steadygrad.losses.multiway import align_gain, multiway_contrastive

NUM = 6
OTHERS = ("cosine", "norm", "distance")  # timed last, in plain torch and in the kernels
CLIP_SCALE = 14.0
Way = Callable[[Sequence[Tensor], float], Tensor]


def einsum_loss(features: Sequence[Tensor], scale: float) -> Tensor:
    """All logits as one [B]^6 tensor; a log-sum-exp over the other five axes for each anchor."""
    left = torch.einsum("ad,bd,cd->abcd", *features[:3])
    right = torch.einsum("ad,bd,cd->abcd", *features[3:])
    logits = scale * torch.einsum("abcz,defz->abcdef", left, right)
    axes = range(NUM)
    sums = torch.stack([logits.logsumexp([a for a in axes if a != m]) for m in axes])
    return (sums - score(features, scale)).mean()


def matmul_loss(features: Sequence[Tensor], scale: float) -> Tensor:
    """Two Khatri-Rao halves and one matmul; rows serve three anchors, columns the others."""
    size = len(features[0])
    left = torch.einsum("ad,bd,cd->abcd", *features[:3]).flatten(0, 2)
    right = torch.einsum("ad,bd,cd->abcd", *features[3:]).flatten(0, 2)
    logits = scale * left @ right.T
    halves = [logits.logsumexp(1).view(size, size, size), logits.logsumexp(0).view(size, size, size)]
    sums = [half.logsumexp([a for a in range(3) if a != m]) for half in halves for m in range(3)]
    return (torch.stack(sums) - score(features, scale)).mean()


def symile_loss(features: Sequence[Tensor], scale: float) -> Tensor:
    """For each anchor, the products of all combinations of the others, written out as [B^5, D], and a cross entropy."""
    size = len(features[0])
    step = sum(size**k for k in range(NUM - 1))  # from one aligned combination to the next
    labels = torch.arange(size, device=features[0].device) * step
    losses = []
    for m in range(NUM):
        product = features[(m + 1) % NUM]
        for other in range(2, NUM):
            product = (product[:, None] * features[(m + other) % NUM]).flatten(0, 1)
        losses.append(F.cross_entropy(scale * features[m] @ product.T, labels))
    return torch.stack(losses).mean()


def plain_fibre_loss(features: Sequence[Tensor], scale: float) -> Tensor:
    """M cross entropies of [B, B] matrices in plain torch."""
    labels = torch.arange(len(features[0]), device=features[0].device)
    losses = []
    for m in range(NUM):
        others = functools.reduce(torch.mul, [f for k, f in enumerate(features) if k != m])
        losses.append(F.cross_entropy(scale * others @ features[m].T, labels))
    return torch.stack(losses).mean()


def ours(**options: Any) -> Way:
    return lambda features, scale: multiway_contrastive(features, scale, **options)


def score(features: Sequence[Tensor], scale: float) -> Tensor:
    return scale * functools.reduce(torch.mul, features).sum(-1)


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if on else "ieee"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def in_tf32(way: Way) -> Way:
    def run(features: Sequence[Tensor], scale: float) -> Tensor:
        with tf32(True):
            return way(features, scale)

    return run


def make_features(size: int, dim: int, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    common = torch.randn(size, dim, device=device)
    rows = [F.normalize(common + 0.5 * torch.randn(size, dim, device=device), dim=1) for _ in range(NUM)]
    return [row.requires_grad_() for row in rows]


def measure(
    way: Way, size: int, dim: int, device: str, rounds: int, *, scale: float | None = None, warm_up: bool = True
) -> dict[str, Any]:
    """Return median milliseconds of forward and backward, peak bytes above the features, and the loss; or out of
    memory.
    """
    if device == "cuda":
        torch.cuda.empty_cache()  # an earlier way may have taken every free block
    features = make_features(size, dim, device)
    scale = CLIP_SCALE * align_gain(NUM, dim) if scale is None else scale
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    times = []
    try:
        for round_number in range(rounds + warm_up):
            if round_number == warm_up and device == "cuda":  # the first round warms up, compiles and loads libraries
                torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated() if device == "cuda" else 0
            sync()
            start = time.perf_counter()
            loss = way(features, scale)
            with tf32(way.__name__ == "run"):
                grads = torch.autograd.grad(loss, features)
            sync()
            times.append(time.perf_counter() - start)
            value = float(loss.detach())
            del loss, grads
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    peak = torch.cuda.max_memory_allocated() - held if device == "cuda" else 0
    return {"milliseconds": statistics.median(times[int(warm_up) :]) * 1e3, "peak_bytes": peak, "loss": value}


def compare(sizes: dict[str, list[int]], dim: int, device: str, rounds: int) -> dict[str, Any]:
    """Time every way at each of its sizes, in one run."""
    ways: dict[str, Way] = {
        "einsum to [B]^6": einsum_loss,
        "one matmul": matmul_loss,
        "one matmul, TF32": in_tf32(matmul_loss),
        "Symile's enumeration": symile_loss,
        "ours, tiled": ours(impl="tiled"),
        "ours": ours(),
        "ours, TF32": ours(precision="tf32"),
        "ours, bf16": ours(precision="bf16"),
    }
    table: dict[str, Any] = {}
    for size in sorted({*sizes["others"], *sizes["ours"]}):
        print(f"\nB={size}: {size**NUM:.2g} logits, {8 * dim * size**NUM / 1e12:.3g} TFLOP in all", flush=True)
        row = table[f"B={size}"] = {}
        for name, way in ways.items():
            if size not in sizes["ours" if name.startswith("ours") else "others"]:
                continue
            row[name] = measure(way, size, dim, device, rounds if size < 48 else 2)
            report(name, row[name])
    return table


def compare_fibre(size: int, dim: int, device: str, rounds: int) -> dict[str, Any]:
    ways = {
        "M cross entropies": plain_fibre_loss,
        "M cross entropies, TF32": in_tf32(plain_fibre_loss),
        "ours": ours(negatives="fibre"),
        "ours, TF32": ours(negatives="fibre", precision="tf32"),
        "ours, bf16": ours(negatives="fibre", precision="bf16"),
    }
    print(f"\nfibre, B={size}", flush=True)
    row = {name: measure(way, size, dim, device, rounds) for name, way in ways.items()}
    for name, found in row.items():
        report(name, found)
    return row


def compare_accuracy(sizes: list[int], dim: int, device: str) -> dict[str, Any]:
    """Return the errors of the loss and of the worst gradient relative to float64, as a share of the norm."""
    table: dict[str, Any] = {}
    for size in sizes:
        print(f"\naccuracy, B={size}", flush=True)
        row = table[f"B={size}"] = {}
        features, scale = make_features(size, dim, device), 14.0 * align_gain(NUM, dim)
        exact = differentiate([f.detach().double().requires_grad_() for f in features], scale, "auto")
        for precision in ("fp32", "tf32", "fp16", "bf16"):
            found = differentiate(features, scale, precision)
            errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact)]
            row[precision] = {"loss": errors[0], "gradients": max(errors[1:])}
            print(f"  {precision:26s} loss {errors[0]:.1e}   gradients {max(errors[1:]):.1e}", flush=True)
    return table


def compare_similarities(sizes: list[int], dim: int, device: str, rounds: int) -> dict[str, Any]:
    """Time the other similarities, "auto" and plain torch. That takes 12 s at B=64 on an H200, so one of them runs
    once.
    """
    table: dict[str, Any] = {}
    for size, similarity in itertools.product(sizes, OTHERS):
        print(f"\n{similarity}, B={size}", flush=True)
        ways = {"ours, tiled": ours(similarity=similarity, impl="tiled"), "ours": ours(similarity=similarity)}
        if device == "cuda" and similarity != "cosine":
            ways["ours, fp16"] = ours(similarity=similarity, precision="fp16")
        large = size > 48
        if large and similarity != "distance":
            del ways["ours, tiled"]
        row = table[f"{similarity}, B={size}"] = {}
        for name, way in ways.items():
            once = large and name == "ours, tiled"
            row[name] = measure(way, size, dim, device, 1 if large else rounds, scale=CLIP_SCALE, warm_up=not once)
            report(name, row[name])
    return table


def compare_similarity_errors(size: int, dim: int, device: str) -> dict[str, Any]:
    """Like `compare_accuracy`, for the other similarities and also for a large scale."""
    table: dict[str, Any] = {}
    for similarity, scale in itertools.product(OTHERS, (14.3, 100.0)):
        print(f"\naccuracy, {similarity}, scale {scale}", flush=True)
        row = table[f"{similarity}, scale {scale}"] = {}
        features = make_features(size, dim, device)
        exact = differentiate([f.detach().double().requires_grad_() for f in features], scale, "auto", similarity)
        for precision in ("fp32", "fp16x3", "tf32", "fp16", "bf16"):
            found = differentiate(features, scale, precision, similarity)
            errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact)]
            row[precision] = {"loss": errors[0], "gradients": max(errors[1:])}
            print(f"  {precision:26s} loss {errors[0]:.1e}   gradients {max(errors[1:]):.1e}", flush=True)
    return table


def count_launches(size: int, dim: int) -> dict[str, int]:
    """Count the kernels, copies and fills that one forward and backward launches, for each similarity."""
    counts = {}
    for similarity in ("mip", *OTHERS):
        scale = CLIP_SCALE * (align_gain(NUM, dim) if similarity == "mip" else 1.0)
        features = make_features(size, dim, "cuda")
        step = functools.partial(differentiate, features, scale, "auto", similarity)
        step()  # compiles
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
            step()
            torch.cuda.synchronize()
        on_device = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        counts[similarity] = len(on_device)
        print(f"  {similarity:26s} {len(on_device)} launches at B={size}", flush=True)
    return counts


def differentiate(features: Sequence[Tensor], scale: float, precision: str, similarity: str = "mip") -> list[Tensor]:
    loss = multiway_contrastive(features, scale, precision=precision, similarity=similarity)
    return [loss.detach(), *torch.autograd.grad(loss, features)]


def report(name: str, found: dict[str, Any]) -> None:
    if "out_of_memory" in found:
        print(f"  {name:26s} out of memory", flush=True)
    else:
        gib = found["peak_bytes"] / 2**30
        print(f"  {name:26s} {found['milliseconds']:10.2f} ms {gib:8.2f} GiB   loss {found['loss']:.5f}", flush=True)


def tune(device: str) -> dict[str, Any]:
    """Return the TFLOP/s of the two kernels and of the products after them, for tile sizes, on one panel as at B=32."""
    # rows, columns, depth, warps, stages. Four warps leave room for a second program, whose matmul fills the gaps.
    shapes = {
        "fp16": [(128, 128, 64, 4, 3), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 128, 64, 8, 3)],
        "bf16": [(128, 128, 64, 4, 3), (128, 128, 64, 4, 2), (128, 128, 64, 8, 3), (128, 256, 64, 8, 3),
                 (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (64, 256, 64, 4, 3), (64, 128, 64, 4, 3)],
        "tf32": [(128, 128, 32, 4, 3), (128, 128, 32, 8, 4), (128, 256, 32, 8, 3), (256, 128, 32, 8, 3),
                 (64, 128, 32, 4, 4), (64, 256, 32, 4, 3)],
        "fp16x3": [(128, 128, 32, 4, 3), (128, 128, 32, 8, 3), (128, 128, 64, 8, 3), (128, 256, 32, 8, 3),
                   (256, 128, 32, 8, 3)],
    }  # fmt: skip
    table: dict[str, Any] = {}
    for precision, cuts in shapes.items():
        for cut in cuts:
            try:
                found = table[f"{precision} {cut}"] = time_tiles(precision, cut, device)
            except Exception as error:  # a tiling that does not fit the chip must not end the others
                print(f"  {precision} {cut}: {type(error).__name__}: {str(error)[:90]}", flush=True)
                continue
            rates = "  ".join(f"{name} {rate:5.0f}" for name, rate in found.items())
            print(f"  {precision} {cut!s:24s} {rates} TFLOP/s", flush=True)
    return table


def time_tiles(precision: str, cut: tuple[int, ...], device: str) -> dict[str, float]:
    """Return TFLOP/s on 4096 x 32768 logits: the sums, the weights, and the weights with both products after them.

    Counted as one product of depth 512, however many are needed.
    """
    from steadygrad.losses.multiway.engine import Diagonal, Panel, Side
    from steadygrad.losses.multiway.precision import get_dtype, use_precision
    from steadygrad.losses.multiway.triton import Tiles, TritonEngine

    num_low = 512 if precision == "fp16x3" else 0
    dtype = get_dtype(precision)
    p, q = (torch.randn(n, 512 + num_low, device=device).to(dtype) * 0.05 for n in (4096, 32768))
    sides = [Side(torch.full((n,), 10.0, device=device), torch.ones(n, device=device)) for n in (4096, 32768)]
    grad_q, weights = torch.zeros(q.shape, device=device), torch.empty(2, 4096, 32768, dtype=dtype, device=device)
    engine = TritonEngine(precision, Tiles(*cut), curve="minus root" if num_low else "line")  # as "auto" chooses them
    unit = torch.ones((), device=device) if dtype == torch.float16 else None
    panel = Panel(p, q, Diagonal(0, 1057, 0, 1057, 4), unit, num_low)
    flop = 2 * math.prod([4096, 32768, 512])
    with use_precision(precision, p.device):
        return {
            "sum": flop / time_call(lambda: engine.sum_panel(panel)) / 1e12,
            "weigh": flop / time_call(lambda: engine.weigh_panel(panel, *sides, weights)) / 1e12,
            "pull": 3 * flop / time_call(lambda: engine.pull_panel(panel, *sides, grad_q)) / 1e12,
        }


def time_call(call: Callable[[], Any], rounds: int = 5) -> float:
    call()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="smaller batches, fewer rounds; nothing is written")
    parser.add_argument("--tune", action="store_true", help="time tile sizes of the kernels, CUDA only")
    args = parser.parse_args()
    print(describe_machine())
    if args.tune:
        print("\nwritten:", write_results("multiway_tiles", tune(args.device)))
        return
    if args.device == "cpu":
        sizes, dim, fibre = {"others": [4, 6], "ours": [4, 6, 8]}, 64, 256
    elif args.quick:
        sizes, dim, fibre = {"others": [16], "ours": [16, 32]}, 512, 2048
    else:
        sizes, dim, fibre = {"others": [16, 24, 32], "ours": [16, 24, 32, 48, 64]}, 512, 8192
    rounds = 3 if args.quick else 7
    table = {"all": compare(sizes, dim, args.device, rounds)}
    table["fibre"] = {f"B={fibre}": compare_fibre(fibre, dim, args.device, rounds)}
    table["accuracy"] = compare_accuracy(sizes["others"][::2], dim, args.device)
    others = sizes["others"] if args.device == "cpu" else [16, 32] if args.quick else [16, 32, 64]
    table["similarities"] = compare_similarities(others, dim, args.device, rounds)
    table["similarities_accuracy"] = compare_similarity_errors(others[0], dim, args.device)
    if args.device == "cuda":
        table["launches"] = {"B=16": count_launches(16, dim)}
    check({name: table[name] for name in ("all", "fibre", "similarities")})
    print("\nwritten:", write_results(f"multiway_{args.device}", table, quick=args.quick))


def check(table: dict[str, Any]) -> None:
    """Check that all ways computed the same loss; otherwise their times mean nothing."""
    for rows in table.values():
        for size, row in rows.items():
            values = {name: found["loss"] for name, found in row.items() if "loss" in found}
            for (a, x), (b, y) in itertools.combinations(values.items(), 2):
                assert abs(x - y) < 0.02 * max(1.0, abs(x)), f"{size}: {a} gives {x}, {b} gives {y}"


if __name__ == "__main__":
    main()
