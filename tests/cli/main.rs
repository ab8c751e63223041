//! Every command of kpx, as an operator runs it. docs/cli.md holds the exact output;
//! `UPDATE_EXPECT=1` writes it again.

mod cleanup;
mod config;
mod document;
mod ends;
mod flows;
mod kubeconfig;
mod lists;
mod node;
mod numbers;
mod schema;
mod sysdump;
