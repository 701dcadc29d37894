"""Train a small network with a known elastic net, and recover both strengths from its weights."""

import torch
from torch import nn
from torch.nn import functional as F

import tacit

RIDGE, LASSO, BETA = 1e-3, 3e-4, 1e-3


def train(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Minimise mean squared error + RIDGE·‖θ‖² + LASSO·smooth_l1(θ) by L-BFGS."""
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=2000,
        history_size=100,
        tolerance_grad=1e-8,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        theta = torch.cat([p.flatten() for p in model.parameters()])
        smooth = F.smooth_l1_loss(theta, torch.zeros_like(theta), beta=BETA, reduction="sum")
        total = F.mse_loss(model(inputs), targets) + RIDGE * theta.square().sum() + LASSO * smooth
        total.backward()
        return total

    optimizer.step(closure)


def trained_network() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """The network at its optimum, and the data it was trained on."""
    torch.set_num_threads(1)  # such small matrices are slower with several threads
    torch.manual_seed(0)
    inputs = torch.randn(300, 5, dtype=torch.float64)
    targets = (2 * inputs[:, :3]).sin().sum(1, keepdim=True) + 0.1 * torch.randn(300, 1).double()
    model = nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Linear(30, 1)).double()
    print(f"training {sum(p.numel() for p in model.parameters())} weights …", flush=True)
    train(model, inputs, targets)
    return model, (inputs, targets)


def objective() -> tacit.Objective:
    """The objective of the trained network, for `tacit estimate elastic_net:objective`."""
    model, data = trained_network()
    return tacit.Objective(model, F.mse_loss, data)


def main() -> None:
    """Train, estimate, and print the estimated and the applied strengths."""
    candidates = [tacit.l2(), tacit.smooth_l1(BETA)]
    fit = tacit.fit(tacit.endpoint_equations(objective(), candidates))
    print(fit.summary())
    for name, applied in {"l2": RIDGE, "smooth_l1": LASSO}.items():
        error = abs(fit.strengths[name] / applied - 1)
        print(
            f"{name:<10} applied {applied:g}, recovered {fit.strengths[name]:.6g} "
            f"(relative error {error:.0e}), explained {fit.explained:.6f}"
        )


if __name__ == "__main__":
    main()
