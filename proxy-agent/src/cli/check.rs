use std::process::ExitCode;
#[derive(clap::Args, Debug)]
pub(super) struct CheckArgs {}
pub(super) async fn check(_: &CheckArgs) -> anyhow::Result<ExitCode> {
    anyhow::bail!("todo")
}
