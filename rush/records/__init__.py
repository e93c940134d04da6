"""The files that runs, ladders, searches and benches write: typed, validated and sealed. Nothing here needs torch.

`typed`         records of one JSON object   `lock`                 one run per folder
`metrics`       a row per step, JSON lines   `checkpoint_store`     sealed folders, renamed when complete
`run_folder`    the files of a run           `checkpoint_manifest`  size and SHA-256 of every file
                                             `checkpoint_pieces`    which file holds which piece of a tensor
"""
