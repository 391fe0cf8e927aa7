"""Makes a loaded model faster from outside; each change leaves what the model computes as it was.

``packed_linear``  weights packed once for the CPU, any ``nn.Linear``
``fused_layer``    a decoder layer of a known structure as a few kernel calls
``embedding``      a table that stays in the checkpoint's type
``apply``          which of them a model gets
"""
