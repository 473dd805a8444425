run("../study.py")
global_batch_size = 1536
micro_batch_size = 16  # divides the sequences of each of 16 or 32 chips, 96 or 48
lr = 1e-4 * (global_batch_size / 6144) ** 0.5
puzzle_emb_lr = lr
lr_warmup_steps = 2000 * 6144 // global_batch_size  # as many examples as the baseline's warm-up
