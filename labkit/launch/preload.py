"""What the fork server imports once, so that no worker has to."""

import torch

import labkit.launch.supervisor  # noqa: F401

# The first optimizer of a process imports a second's worth of torch that `import torch` leaves out. No
# gradient is computed here: the threads that would start do not survive a fork.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
