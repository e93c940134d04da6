"""What a run writes down, and how it is kept safe. Nothing here needs torch.

`files`        atomic writing and hashing          `lock`         one run per folder
`metrics`      a row per step, in JSON lines       `checkpoints`  sealed folders with a manifest
`pieces`       which rank wrote which part           `run_folder`   where everything lies
"""
