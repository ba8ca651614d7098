"""Pre-trains BERT.

  python -m bertjax.main --config=configs/quickstart.py --workdir=runs/quickstart

Running the same command on the same workdir resumes. Exit codes: 0 training is complete; 143
stopped by a signal after a save, restart me; 75 another process is gone, restart all; 1 an error,
in words; 2 flags, a configuration or data that cannot be used.
"""

from bertjax import command


def train(config, workdir: str) -> int:
  """Pre-trains as the configuration says."""
  from bertjax import pretraining  # after the flags: a wrong one is answered at once

  return pretraining.run(config, workdir)


if __name__ == '__main__':
  command.run(train)
