"""Pre-training that goes on from a checkpoint on one's own text: the commonest use of all.

  python -m bertjax.convert.import_checkpoint --from hf:bert-base/ --output ckpt/
  python -m bertjax.data.build --input 'text/*.txt' --output shards/ \
      --tokenizer ckpt/checkpoints/0/bertjax/tokenizer
  python -m bertjax.main --config=configs/continue.py --config.init_from=ckpt/ \
      --config.data.path=shards/ --workdir=runs/domain

Source: google-research/bert README (a rate of 2e-5 for further pre-training). Sizes come from the
checkpoint; heads that it lacks are newly initialised, and the start-up block names them. Expect the
masked-LM loss to fall from the first hundred steps on, if the text differs from what the checkpoint
knows.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
  """Ten thousand steps of 32 x 128."""
  config = common.get_config()
  config.model = ConfigDict({
      'hidden_dropout_prob': 0.1,
      'attention_probs_dropout_prob': 0.1,
      'dtype': 'bfloat16',
      'remat': 'none',
      'scan_unroll': 1,
      'attention': 'auto',
  })
  config.phases = (common.phase(seq_length=128, batch_size=32, num_steps=10_000),)
  config.optimizer.learning_rate = 2e-5
  config.optimizer.warmup_steps = 1000
  return config
