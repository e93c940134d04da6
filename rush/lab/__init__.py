"""The lab: what each technique gains on this machine, measured in fresh processes and proved."""
