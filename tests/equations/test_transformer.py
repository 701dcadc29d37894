"""A Hugging Face style language model: dict batches, padding, tied embeddings, attention."""

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import tacit
from tacit import reference


@pytest.fixture(scope="module")
def language_model():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=13, n_positions=8, n_embd=8, n_layer=2, n_head=2,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double()
    model.train()  # left in training mode by a careless loop
    return model


def make_batches(seed=1):
    """Three dict batches of different size, with padding of different length."""
    generator = torch.Generator().manual_seed(seed)
    for size in (4, 3, 2):
        ids = torch.randint(1, 13, (size, 8), generator=generator)
        lengths = torch.randint(4, 9, (size,), generator=generator)
        mask = (torch.arange(8) < lengths[:, None]).long()
        yield {"input_ids": ids * mask, "attention_mask": mask}


def token_losses(model, batch):
    """One cross entropy per predicted token that is not padding."""
    logits = model(**batch).logits[:, :-1]
    target, real = batch["input_ids"][:, 1:], batch["attention_mask"][:, 1:].bool()
    return F.cross_entropy(logits[real], target[real], reduction="none")


@pytest.fixture(scope="module")
def objective(language_model):
    return tacit.Objective.from_batch_loss(language_model, token_losses, list(make_batches()))


@pytest.fixture(scope="module")
def dense_loss(language_model):
    """The mean over all tokens as one graph, with attention on the math backend."""

    class MeanLoss(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self):
            return torch.cat([token_losses(self.model, batch) for batch in make_batches()]).mean()

    mean_loss = MeanLoss(language_model)

    def loss(params):
        training = language_model.training
        language_model.eval()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            value = functional_call(mean_loss, {f"model.{n}": p for n, p in params.items()}, ())
        language_model.train(training)
        return value

    return loss


def test_the_objective_counts_tokens_and_has_tied_weights_once(
    objective, dense_loss, language_model
):
    tokens = sum(int(batch["attention_mask"][:, 1:].sum()) for batch in make_batches())
    assert objective.count == tokens
    assert "lm_head.weight" not in objective.params
    assert objective.value() == pytest.approx(float(dense_loss(objective.params)), rel=1e-12)
    assert language_model.training


def fit_and_compare(objective, dense_loss, regularizers, design):
    """A fit of the endpoint equations, after comparing it with the dense solution."""
    fit = tacit.fit(tacit.endpoint_equations(objective, regularizers))
    target = reference.endpoint_target(dense_loss, objective.params)
    expected = reference.fit(design, target)
    assert list(fit.strengths.values()) == pytest.approx(expected.tolist(), rel=1e-6)
    assert fit.explained == pytest.approx(reference.explained(design, expected, target), abs=1e-10)
    assert fit.sources[0].tied == 1
    return fit


def test_layerwise_ridge_equals_the_dense_oracle(objective, dense_loss):
    family = tacit.layerwise(tacit.l2())
    design = reference.design([family], objective.params)
    fit = fit_and_compare(objective, dense_loss, [family], design)
    assert {"l2[transformer.wte]", "l2[transformer.h.1.mlp.c_fc]"} < fit.strengths.keys()


def test_ridge_and_gradient_norm_equal_the_dense_oracle(objective, dense_loss):
    params = objective.params
    gradient = reference.gradient(dense_loss, params)
    leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
    parts = torch.autograd.grad(dense_loss(leaves), list(leaves.values()), create_graph=True)
    flat_gradient = torch.cat([part.reshape(-1) for part in parts])
    product = torch.autograd.grad(flat_gradient @ gradient, list(leaves.values()))
    column = 2 * torch.cat([part.reshape(-1) for part in product])
    design = torch.stack([2 * reference.flat(params), column], dim=1)
    regularizers = [tacit.l2(), tacit.regularizers.gradient_norm(objective)]
    fit_and_compare(objective, dense_loss, regularizers, design)


def test_difference_equations_of_its_dropout_can_be_written(language_model, objective):
    technique = tacit.Objective.from_batch_loss(
        language_model, token_losses, list(make_batches()), training=True, draws=4
    )
    fit = tacit.fit(
        tacit.difference_equations(
            technique, objective, [tacit.l2(), tacit.regularizers.gradient_norm(objective)]
        )
    )
    assert fit.sources[0].mode == "difference"
    assert fit.equations.targets == 4
