run("../study.py")
global_batch_size = 49152
lr = 1e-4 * (global_batch_size / 6144) ** 0.5
puzzle_emb_lr = lr
lr_warmup_steps = 2000 * 6144 // global_batch_size  # as many examples as the baseline's warm-up
