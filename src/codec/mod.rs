//! Latent codecs: pixels <-> latents with the geometry of the Wan2.2 VAE.
