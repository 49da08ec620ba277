from setuptools import find_packages, setup

setup(
    name="arlopti_openrlhf",
    version="0.1.0",
    description="Advantage Reweighting and Low-Probability Token Isolation for OpenRLHF",
    long_description=open("README.md", encoding="utf-8").read(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["arlopti_openrlhf", "arlopti_openrlhf.*", "rewards"]),
    install_requires=["openrlhf>=0.11.2,<0.12"],
    extras_require={
        "gpu": ["openrlhf[vllm]>=0.11.2,<0.12", "flash-attn==2.8.3"],
        "dev": ["matplotlib", "pre-commit", "pytest", "pytest-timeout", "ruff"],
    },
    # vLLM loads its plugins in every process that it starts: the only way into its engine process.
    entry_points={"vllm.general_plugins": ["arlopti_cpu = arlopti_openrlhf.cpu:enable"]},
)
