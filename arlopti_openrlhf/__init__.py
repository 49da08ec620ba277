"""Token-level updates for OpenRLHF: Advantage Reweighting (AR) and Low-Probability Token Isolation (Lopti) of
*Do Not Let Low-Probability Tokens Over-Dominate in RL for LLMs* (arXiv 2505.12929).

The mathematics is in `arlopti_openrlhf.token_update` (torch alone). `arlopti train` is OpenRLHF's own training command
with the methods' flags added. `arlopti_openrlhf.launcher` gives the methods to a launcher of one's own.
"""

__version__ = "0.1.0"
