"""Candidates of a screen: every family of the catalogue, and none that spoils the others."""

import pytest
import torch
from support.models import params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import Objective, endpoint_target
from tacit.identifiability.proposals import NOT_SCREENED, propose
from tacit.regularizers.overview import CATALOGUE


class Dropped(nn.Module):
    """A classifier with dropout, for all families of the catalogue at once."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 5), nn.ReLU(),
            nn.Dropout(0.2), nn.Linear(5, 3),
        ).double()  # fmt: skip

    def forward(self, x):
        return self.net(x)


def classes(count=24):
    return random_data(0, count, inputs=4)[0], torch.arange(count) % 3


def names_of(target, **options):
    settings = {"start": None, "optimizer": None, "cost": "weights", **options}
    proposals = propose(target, **settings)
    return [c.regularizer.name for c in proposals.candidates], proposals.left_out


def test_every_family_of_the_catalogue_is_a_candidate_or_has_a_reason():
    model = nn.Sequential(*Dropped().net)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    X, y = classes()
    F.cross_entropy(model(X), y).backward()
    optimizer.step()
    target = endpoint_target(Objective(model, F.cross_entropy, (X, y), batch_size=8))
    start = {n: p + 0.1 for n, p in params_of(model).items()}
    names, left_out = names_of(target, start=start, optimizer=optimizer, cost="second-order")
    families = {name.partition("(")[0].partition("[")[0] for name in names}
    families |= {"metric_ridge"} if "weight_decay" in families else set()
    for entry in CATALOGUE:
        assert entry.name in families or left_out.get(entry.name), entry.name
    assert not families & NOT_SCREENED.keys()
    assert {"label_smoothing", "dropout_moments", "distance_to[matrices]"} <= {*names}


def test_the_cost_limits_the_families():
    target = endpoint_target(Objective(nn.Sequential(*Dropped().net), F.cross_entropy, classes()))
    weights, one_pass, all_names = (
        {*names_of(target, cost=cost)[0]} for cost in ("weights", "pass", "second-order")
    )
    assert one_pass - weights == {"label_smoothing", "activation_norm"}
    assert "gradient_norm" in all_names - one_pass


def test_widths_are_the_powers_of_ten_among_the_weights():
    model = nn.Linear(4, 3).double()
    nn.init.uniform_(model.weight, -0.5, 0.5)
    nn.init.uniform_(model.bias, -0.5, 0.5)
    target = endpoint_target(
        Objective(model, F.mse_loss, (torch.ones(5, 4).double(), torch.ones(5, 3).double()))
    )
    names, _ = names_of(target)
    assert [n for n in names if n.startswith("smooth") and "[" not in n] == [
        "smooth_l1(0.01)", "smooth_l1(0.1)",
    ]  # fmt: skip


def test_a_target_from_a_file_has_candidates_of_its_weights(tmp_path):
    model = tanh_mlp(0)
    endpoint_target(Objective(model, F.mse_loss, random_data(0))).save(tmp_path / "target")
    names, _ = names_of(tacit.Target.load(tmp_path / "target"), cost="second-order")
    assert "l2" in names
    assert "activation_norm" not in names


@pytest.mark.parametrize(("rank", "dropped", "kept"), [
    (2, {"l1", "group_l2"}, {"nuclear_norm"}),  # lower than the zeros make it
    (None, {"nuclear_norm"}, {"l1", "group_l2"}),  # due to the zeros
])  # fmt: skip
def test_zeros_and_low_ranks_are_not_in_one_screen(rank, dropped, kept):
    model = nn.Linear(6, 6, bias=False).double()
    torch.manual_seed(3)
    weights = torch.randn(6, 6).double()
    if rank:
        u, s, vh = torch.linalg.svd(weights)
        weights = (u[:, :rank] * s[:rank]) @ vh[:rank]
    with torch.no_grad():
        model.weight.copy_(weights)
        model.weight[0] = 0.0
    X, y = random_data(0, inputs=6, outputs=6)
    target = endpoint_target(Objective(model, F.mse_loss, (X, y)))
    names, left_out = names_of(target)
    assert dropped <= left_out.keys()
    assert kept <= {*names}
    assert all("zeros" in left_out[name] for name in dropped)
    assert target.equations(propose_regularizers(target)).rows > 0


def test_a_low_rank_without_zeros_keeps_singular_values_in_the_screen():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 4, bias=False)).double()
    with torch.no_grad():
        model[0].weight[1:] = 0.0  # of rank 1 by its zeros alone
        u, s, vh = torch.linalg.svd(model[1].weight, full_matrices=False)
        model[1].weight.copy_((u[:, :2] * s[:2]) @ vh[:2])
    X, y = random_data(0, inputs=6, outputs=4)
    names, left_out = names_of(endpoint_target(Objective(model, F.mse_loss, (X, y))))
    assert "nuclear_norm" in names
    assert {"l1", "group_l2"} <= left_out.keys()


def propose_regularizers(target):
    proposals = propose(target, start=None, optimizer=None, cost="weights")
    return [candidate.regularizer for candidate in proposals.candidates]


def test_a_column_that_takes_a_pass_is_computed_once():
    model, reads = tanh_mlp(0), []
    X, y = random_data(0)

    class Batches:
        def __iter__(self):
            reads.append(1)
            return iter([(X, y)])

        def __len__(self):
            return 1

    target = endpoint_target(Objective(model, F.mse_loss, Batches()))
    before = len(reads)
    proposals = propose(target, start=None, optimizer=None, cost="pass")
    bound = len(reads) - before
    target.equations([c.regularizer for c in proposals.candidates])
    assert "activation_norm" in [c.regularizer.name for c in proposals.candidates]
    assert len(reads) - before == bound
