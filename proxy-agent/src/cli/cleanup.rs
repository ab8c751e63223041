#[derive(clap::Args, Debug)]
pub(super) struct CleanupArgs {}
pub(super) async fn cleanup(_: &CleanupArgs) -> anyhow::Result<()> {
    anyhow::bail!("todo")
}
