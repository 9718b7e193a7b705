"""The multiway loss on partial data: absent modalities, sampled and permuted negatives, several processes."""

from __future__ import annotations

import math
from functools import reduce
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from multiway_inputs import assert_same, evaluate, make_features, make_scale
from torch import Tensor

from steadygrad.errors import UnsupportedError, UsageError
from steadygrad.losses.multiway import multiway_contrastive
from steadygrad.losses.multiway.similarity import SIMILARITIES

every_similarity = pytest.mark.parametrize("similarity", SIMILARITIES)


def scale_for(similarity: str, num: int, dim: int) -> Tensor:
    return make_scale(num if similarity == "mip" else 2, dim)


def make_present(size: int, num: int) -> Tensor:
    """Complete samples, some without one or two modalities, one with a single modality, one with none."""
    present = torch.ones(size, num, dtype=torch.bool)
    present[1, 0] = present[2, 1] = present[2, 2] = False
    present[3, 1:] = False
    present[4] = False
    return present


# --- absent modalities --------------------------------------------------------------------------------------------


@every_similarity
@pytest.mark.parametrize("negatives", ["all", "fibre"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_with_absent_modalities_the_tiled_loss_equals_the_specification(
    similarity: str, negatives: str, reduction: str
) -> None:
    features, scale = make_features(4, 7, 5), scale_for(similarity, 4, 5)
    options = {"similarity": similarity, "negatives": negatives, "reduction": reduction, "present": make_present(7, 4)}
    assert_same(
        evaluate(features, scale, impl="tiled", **options),
        evaluate(features, scale, impl="naive", **options),
        rtol=1e-9,
        atol=1e-9,
    )


@every_similarity
@pytest.mark.parametrize("negatives", ["all", "fibre", "sampled", "permuted"])
def test_values_of_absent_modalities_are_never_read(similarity: str, negatives: str) -> None:
    features, scale, present = make_features(4, 7, 5), scale_for(similarity, 4, 5), make_present(7, 4)
    options = {"similarity": similarity, "negatives": negatives, "present": present, "reduction": "none"}
    before = evaluate(features, scale, generator=torch.Generator().manual_seed(1), **options)
    with torch.no_grad():
        for m, feature in enumerate(features):
            feature[~present[:, m]] = math.nan
    after = evaluate(features, scale, generator=torch.Generator().manual_seed(1), **options)
    assert all(torch.equal(a, b) for a, b in zip(before, after))
    for m, grad in enumerate(after[2:]):
        assert bool((grad[~present[:, m]] == 0).all())
    assert bool((after[0][~present] == 0).all())
    assert bool((after[0][3:5] == 0).all()), "a sample with fewer than two modalities has nothing to align"


@every_similarity
@pytest.mark.parametrize("negatives", ["all", "fibre"])
def test_a_full_mask_equals_no_mask(similarity: str, negatives: str) -> None:
    features, scale = make_features(4, 5, 6), scale_for(similarity, 4, 6)
    options = {"similarity": similarity, "negatives": negatives}
    plain = evaluate(features, scale, **options)
    masked = evaluate(features, scale, present=torch.ones(5, 4, dtype=torch.bool), **options)
    assert_same(masked, plain, rtol=1e-10, atol=1e-12)


@every_similarity
@pytest.mark.parametrize("negatives", ["all", "fibre", "sampled", "permuted"])
def test_an_empty_mask_gives_a_zero_connected_to_the_graph(similarity: str, negatives: str) -> None:
    features, scale = make_features(3, 4, 5, dtype=torch.float32), make_scale(3, 5, dtype=torch.float32)
    present = torch.zeros(4, 3, dtype=torch.bool)
    found = evaluate(features, scale, similarity=similarity, negatives=negatives, present=present)
    assert all(bool((tensor == 0).all()) for tensor in found)


def test_a_complete_sample_is_compared_only_with_what_is_present() -> None:
    features, scale = make_features(3, 4, 5), make_scale(3, 5)
    present = torch.ones(4, 3, dtype=torch.bool)
    present[1, 2] = False
    a, b, c = features
    loss = multiway_contrastive(features, scale, present=present, reduction="none")
    table = scale * torch.einsum("d,jd,kd->jk", a[0], b, c)[:, [0, 2, 3]]
    torch.testing.assert_close(loss[0, 0], table.reshape(-1).logsumexp(0) - table[0, 0])


@pytest.mark.parametrize("negatives", ["all", "fibre"])
@pytest.mark.parametrize("similarity", ["mip", "cosine"])
def test_smoothing_counts_only_present_classes(negatives: str, similarity: str) -> None:
    features, scale, present = make_features(3, 4, 5), scale_for(similarity, 3, 5), torch.ones(4, 3, dtype=torch.bool)
    present[1, 2] = False
    options = {"negatives": negatives, "similarity": similarity, "present": present, "reduction": "none"}
    sharp = multiway_contrastive(features, scale, **options)
    smooth = multiway_contrastive(features, scale, label_smoothing=0.3, **options)
    # For sample 0, anchor 0, from the explicit logits.
    pair = (lambda x, y, z: (x * y * z).sum(-1)) if similarity == "mip" else (
        lambda x, y, z: ((x * y).sum(-1) + (x * z).sum(-1) + (y * z).sum(-1)) / 3
    )  # fmt: skip
    a, b, c = features
    if negatives == "all":
        classes = scale * pair(a[0], b[:, None], c[[0, 2, 3]][None])
    else:
        classes = scale * pair(a, b[0], c[0])
    positive = scale * pair(a[0], b[0], c[0])
    torch.testing.assert_close(smooth[0, 0], sharp[0, 0] + 0.3 * (positive - classes.mean()))


# --- sampled and permuted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [3, 5])
def test_sampling_with_correction_approaches_the_full_loss(num: int) -> None:
    features, scale = [f.detach() for f in make_features(num, 8, 32)], make_scale(num, 32).item() / 14.0
    exact = multiway_contrastive(features, scale)
    errors = []
    for count in (100, 10_000):
        generator = torch.Generator().manual_seed(3)
        draws = [
            multiway_contrastive(features, scale, negatives="sampled", num_samples=count, generator=generator)
            for _ in range(20)
        ]
        errors.append(float((torch.stack(draws).mean() - exact).abs()))
    # Without the weight log((N - 1) / K) the error at 100 samples would be log(8^4 / 100) = 3.7 at M=5.
    assert errors[0] < 0.2
    assert errors[1] < 0.02


def test_drawing_every_combination_once_is_exact() -> None:
    """M=2: K samples that are exactly the B others, with weight 1."""
    features, scale = make_features(2, 2, 6), make_scale(2, 6)
    found = multiway_contrastive(features, scale, negatives="sampled", num_samples=50)
    torch.testing.assert_close(found, multiway_contrastive(features, scale))


def test_permuted_equals_symile_with_one_negative_from_each_other_row() -> None:
    features, scale = make_features(3, 6, 8), make_scale(3, 8)
    found = multiway_contrastive(
        features, scale, negatives="permuted", generator=torch.Generator().manual_seed(5), reduction="none"
    )
    generator = torch.Generator().manual_seed(5)
    for anchor in range(3):
        others = [features[m][torch.randperm(6, generator=generator)] for m in range(3) if m != anchor]
        logits = scale * features[anchor] @ reduce(torch.mul, others).T
        positives = scale * reduce(torch.mul, features).sum(-1)
        logits = torch.where(torch.eye(6, dtype=torch.bool), positives, logits)
        expected = torch.nn.functional.cross_entropy(logits, torch.arange(6), reduction="none")
        torch.testing.assert_close(found[:, anchor], expected)


@pytest.mark.parametrize("negatives", ["sampled", "permuted"])
@every_similarity
def test_the_gradients_of_estimates_match_their_value(negatives: str, similarity: str) -> None:
    features, scale = make_features(3, 4, 5), scale_for(similarity, 3, 5)

    def loss(scale: Tensor, *features: Tensor) -> Tensor:
        return multiway_contrastive(
            features, scale, negatives=negatives, similarity=similarity, num_samples=7,
            generator=torch.Generator().manual_seed(2),
        )  # fmt: skip

    assert torch.autograd.gradcheck(loss, (scale, *features))


def test_the_mean_over_permutations_refuses_smoothing() -> None:
    with pytest.raises(UnsupportedError, match="permuted"):
        multiway_contrastive(make_features(3, 4, 5), 1.0, negatives="permuted", label_smoothing=0.1)


# --- several processes --------------------------------------------------------------------------------------------


def test_gathering_without_processes_raises_an_error() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        multiway_contrastive(make_features(3, 4, 5), 1.0, gather=True)


CASES = [
    {"negatives": "all"},
    {"negatives": "all", "label_smoothing": 0.1},
    {"negatives": "fibre"},
    {"negatives": "all", "similarity": "norm"},
    {"negatives": "all", "present": True},
    {"negatives": "fibre", "present": True},
    {"negatives": "all", "impl": "naive"},
]


def test_two_processes_have_the_loss_and_gradients_of_one(tmp_path: Path) -> None:
    """Each process holds half of the batch; DistributedDataParallel averages over processes."""
    torch.multiprocessing.spawn(run_rank, args=(2, str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    torch.manual_seed(7)
    features, scale = make_features(4, 6, 5), make_scale(4, 5)
    for case, parts in zip(CASES, zip(*ranks), strict=True):
        expected = evaluate(features, scale, **prepare(case))
        mean = [sum(values) / 2 for values in zip(*(part[:2] for part in parts))]
        joined = [torch.cat(values) / 2 for values in zip(*(part[2:] for part in parts))]
        assert_same([*mean, *joined], expected, rtol=1e-10, atol=1e-12)


def prepare(case: dict[str, object]) -> dict[str, object]:
    return {**case, "present": make_present(6, 4)} if "present" in case else case


def run_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    torch.manual_seed(7)
    features, scale = make_features(4, 6, 5), make_scale(4, 5)
    own = slice(rank * 3, rank * 3 + 3)
    found = []
    for case in CASES:
        options = prepare(case)
        if "present" in options:
            options["present"] = options["present"][own]  # type: ignore[index]
        local = [f.detach()[own].requires_grad_() for f in features]
        found.append([t.detach() for t in evaluate(local, scale, gather=True, **options)])
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
