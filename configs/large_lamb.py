"""BERT-large with LAMB and very large batches: the recipe for a pod and an hour.

  python -m bertjax.main --config=configs/large_lamb.py --workdir=gs://bucket/large_lamb \
      --config.data.path=shards/ --distributed

Source: NVIDIA's BERT (DeepLearningExamples, PyTorch/LanguageModeling/BERT): 7,038 steps of 65,536
at length 128, rate 6e-3 with 28.43 % warm-up, then 1,563 steps of 32,768 at length 512, rate 4e-3
with 12.8 %; decay with power 0.5. There it ends with a loss of 1.244 in 1.2 hours on 256 A100.

Between the phases the moments are carried over and the schedule begins anew, with its own warm-up.
`accumulate` cuts a batch into parts that fit: raise it on fewer devices, the result stays the same.
`--config=configs/large_lamb.py:phase2 --config.init_from=RUN` is the second phase alone,
from weights trained at length 128; moments begin at zero.
"""

from ml_collections import ConfigDict

from configs import common, large


def get_config(variant: str = '') -> ConfigDict:
  """Two phases, two schedules; `variant` is '' or 'phase2'.

  Raises:
    ValueError: another variant.
  """
  if variant not in ('', 'phase2'):
    raise ValueError(f"configs/large_lamb.py:{variant}: write ':phase2' or nothing behind the file")
  config = large.get_config()
  first = common.phase(seq_length=128, batch_size=65_536, num_steps=7038)
  first.accumulate = 8
  second = common.phase(seq_length=512, batch_size=32_768, num_steps=1563)
  second.accumulate = 16
  second.max_predictions_per_seq = 80
  second.learning_rate = 4e-3
  second.warmup_steps = round(0.128 * 1563)
  config.phases = (second,) if variant else (first, second)
  config.optimizer.name = 'lamb'
  config.optimizer.bias_correction = True
  config.optimizer.learning_rate = 6e-3
  config.optimizer.warmup_steps = round(0.2843 * 7038)
  config.optimizer.power = 0.5
  config.checkpoint.every = 200
  config.heldout.every = 200
  return config
