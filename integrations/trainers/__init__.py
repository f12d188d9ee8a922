"""What drives an engine during training: TRL and PPO hooks, and the controller for other trainers."""
