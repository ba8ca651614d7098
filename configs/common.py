"""What all pre-training configurations share; each other file changes what it is about.

Every key may be set on the command line: `--config.optimizer.learning_rate=2e-4`. Keys, units and
meaning: the dataclasses of bertjax/settings.py, bertjax/model.py (BertConfig) and bertjax/optim.py
(OptimizerSettings).
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  """BERT-base with the paper's dropout and optimizer, and no phases yet."""
  config = ConfigDict()
  config.seed = 0
  config.init_from = ''  # a checkpoint whose weights start a new schedule
  config.log_every = 100

  config.model = ConfigDict({
      'hidden_size': 768,
      'num_hidden_layers': 12,
      'num_attention_heads': 12,
      'intermediate_size': 3072,
      'hidden_act': 'gelu',
      'hidden_dropout_prob': 0.1,
      'attention_probs_dropout_prob': 0.1,
      'max_position_embeddings': 512,
      'type_vocab_size': 2,
      'initializer_range': 0.02,
      'layer_norm_eps': 1e-12,
      'dtype': 'bfloat16',  # of the computation; parameters are float32
      'remat': 'none',
      'scan_unroll': 1,
      'attention': 'auto',  # or 'xla', 'cudnn', 'splash'; see bertjax/attention.py
  })
  config.data = ConfigDict({
      'path': '',  # shards from bertjax.data.build; several with a comma are one mixture
      'weights': (),
      'sampling_exponent': 1.0,
      'input': '',  # or raw text, from which tokenizer and shards are made in the workdir
      'format': 'auto',
      'language': 'en',
      'tokenizer_type': 'wordpiece',
      'vocab_size': 30522,
      'heldout': 0.01,
      'num_workers': 1,
      'next_sentence': 'nsp',
      'masked_lm_prob': 0.15,
      'short_seq_prob': 0.1,
      'whole_word_masking': False,
      'random_words': 'ordinary',
  })
  config.phases = ()
  config.optimizer = ConfigDict({
      'name': 'adamw',
      'learning_rate': 1e-4,
      'warmup_steps': 10_000,
      'end_learning_rate': 0.0,
      'power': 1.0,  # of the decay
      'weight_decay': 0.01,
      'b1': 0.9,
      'b2': 0.999,
      'eps': 1e-6,
      'bias_correction': False,
      'moments_dtype': 'float32',  # or 'bfloat16': 8 instead of 12 bytes of state a parameter
      'clip_norm': 1.0,
  })
  # Devices along each axis; or --config.mesh.auto=True chooses them and logs why.
  config.mesh = ConfigDict({'data': -1, 'fsdp': 1, 'model': 1, 'auto': False})
  config.checkpoint = ConfigDict({'every': 1000, 'keep_last': 3, 'keep_every': 0})
  config.heldout = ConfigDict({'every': 1000, 'max_examples': 4096, 'batch_size': 0})
  return config


def phase(seq_length: int, batch_size: int, num_steps: int) -> ConfigDict:
  """A stretch of training; what else may be set is in bertjax.settings.Phase."""
  return ConfigDict({
      'seq_length': seq_length,
      'batch_size': batch_size,
      'num_steps': num_steps,
      'accumulate': 1,
      'max_examples_per_row': 1,  # more: rows are packed
      'seq_lengths': (),  # of rows, ending in seq_length: batches of rows of a few lengths
      'max_predictions_per_seq': 0,
      'learning_rate': 0.0,
      'warmup_steps': 0,
      'restart_moments': False,
  })
