run("../baseline.py")
# Where is the critical batch size, and what does a larger batch do for throughput?
global_batch_size = 1536
micro_batch_size = 16  # 32 chips have 48 sequences each
lr = 1e-4 * (global_batch_size / 6144) ** 0.5
puzzle_emb_lr = lr
lr_warmup_steps = 2000 * 6144 // global_batch_size  # of as many examples as the baseline's: the largest batch has 1017 steps in all
wandb_log = True
wandb_project = "TRM-Exp06-BatchSize"
wandb_run_name = "exp06_a_batch1536"
out_dir = "out/study/exp06_a_batch1536"
