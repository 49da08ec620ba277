"""The seams: what our code leans on in OpenRLHF, DeepSpeed, vLLM, Ray, PyTorch and transformers.

`update`, `run`, `samples`, `checkpoints`, `command` and `cpu` are the tables, one for each part of ours that leans on
something. The training command reads them before it starts (`check.moved`), and `tests/contract` tests each line.

To add an entry, choose the table of the module that leans, and the kind (`kinds`): `Signature` where we call or
override a function, `Text` where we count on a statement, `Fields` where we count on a class's fields, and `Body`
where we restate a function. Its last argument names what of ours leans on it, as `module.Class.method` without the
package's name, and after a colon what it does there. `python -m pytest tests/contract -k NAME` tests it.
"""
