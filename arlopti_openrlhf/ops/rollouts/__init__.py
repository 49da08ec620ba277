"""What a run trains on: prompts, samples, rewards, evaluations.

Each `install` here puts ours in place of OpenRLHF's, and is called on the driver before the CLI's `train`. Ray pickles
OpenRLHF's actors by value, with their modules' globals as they are on the driver.
"""
