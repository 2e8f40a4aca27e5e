"""What the fork server imports once, so that no worker has to."""

import signal

# Ctrl-C reaches the whole foreground group, but is for whoever launches. Supervisors set their own handler.
signal.signal(signal.SIGINT, signal.SIG_IGN)

import torch  # noqa: E402

import labkit.launch.supervisor  # noqa: E402, F401

# The first optimizer of a process imports a second's worth of torch that `import torch` leaves out. No
# gradient is computed here: the threads that would start do not survive a fork.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
