"""What all fine-tuning configurations share (paper, appendix A.3).

Keys, units and meaning: the dataclasses of bertjax/finetune/settings.py and bertjax/optim.py.
Sizes, vocabulary and tokenizer come from the checkpoint in `init_from`.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  """Three epochs of 32 with Adam, bias correction on."""
  config = ConfigDict()
  config.init_from = ''  # a checkpoint of bertjax.main or bertjax.convert.import_checkpoint
  config.from_scratch = False  # True: its sizes and tokenizer, but random weights
  config.mode = 'train'  # 'eval' prints scores, 'predict' writes files
  config.seed = 0
  config.seeds = ()  # e.g. (0, 1, 2, 3, 4): a run for each, and a table
  config.learning_rates = ()  # e.g. (2e-5, 3e-5, 5e-5): a run for each (and each seed)
  config.batch_size = 32
  config.accumulate = 1
  config.num_epochs = 3
  config.seq_length = 128  # examples are cut to so many tokens
  config.seq_lengths = ()  # of rows, each compiled once; (): a few that leave the least padding
  config.warmup_share = 0.1
  config.log_every = 50
  # What may differ from the checkpoint. bfloat16 on accelerators, float32 on a CPU.
  config.model = ConfigDict({
      'dtype': 'float32',
      'hidden_dropout_prob': 0.1,
      'attention_probs_dropout_prob': 0.1,
      'remat': 'none',
      'scan_unroll': 1,
      'attention': 'auto',
  })
  config.head = ConfigDict({'dropout': 0.1, 'layers': 'last'})
  config.optimizer = ConfigDict({
      'name': 'adamw',
      'learning_rate': 2e-5,
      'end_learning_rate': 0.0,
      'weight_decay': 0.01,
      'b1': 0.9,
      'b2': 0.999,
      'eps': 1e-6,
      # Unlike in pre-training: without it runs on little data often fail (Mosbach et al. 2021).
      'bias_correction': True,
      'clip_norm': 1.0,
      'layer_decay': 1.0,
      'freeze': 'none',
      'freeze_layers': 0,
  })
  # Devices along each axis; or --config.mesh.auto=True chooses them and logs why.
  config.mesh = ConfigDict({'data': -1, 'fsdp': 1, 'model': 1, 'auto': False})
  config.checkpoint = ConfigDict({'every': 0, 'keep_last': 1})  # 0: once an epoch
  config.evaluate = ConfigDict({'every': 0, 'metric': '', 'patience': 0, 'batch_size': 0})
  return config


def argument(text: str, name: str, default: str) -> str:
  """The value of `name=value` behind the colon of --config=FILE:name=value.

  Raises:
    ValueError: something else stands there.
  """
  if not text:
    return default
  key, _, value = text.partition('=')
  if key != name or not value:
    raise ValueError(f'{text!r} behind the configuration file; write {name}=VALUE')
  return value
