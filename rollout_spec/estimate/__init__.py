"""What drafts would gain on recorded rollouts: `rollout-spec estimate`."""
