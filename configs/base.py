r"""BERT-base with the paper's recipe: 900,000 steps at length 128, then 100,000 at 512.

  python -m bertjax.main --config=configs/base.py --workdir=gs://bucket/base \
    --config.data.path=shards/

Source: Devlin et al. 2018, appendix A.2: batches of 256, Adam at 1e-4 without bias correction,
warm-up over 10,000 steps, then linear decay to 0 over one schedule of 1,000,000; moments are
carried from one phase to the next. Expect on Wikipedia and Books a held-out masked-LM perplexity of
about 4.0 and a next-sentence accuracy of 0.97 to 0.98 (the paper's figures; not yet reproduced
here). The compute is 2.4e19 FLOP.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
  """Twelve layers of 768; the sizes are those of common.py."""
  config = common.get_config()
  config.phases = (
      common.phase(seq_length=128, batch_size=256, num_steps=900_000),
      common.phase(seq_length=512, batch_size=256, num_steps=100_000),
  )
  config.checkpoint.every = 5000
  config.checkpoint.keep_every = 100_000
  config.heldout.every = 10_000
  return config
