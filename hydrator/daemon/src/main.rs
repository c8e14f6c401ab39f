// SPDX-License-Identifier: Apache-2.0
//! The command line.

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use clap::{CommandFactory, Parser};
use localstor_hydrator::arguments::{Arguments, Command};
use localstor_hydrator::protocol::Request;
use localstor_hydrator::serve::End;
use localstor_hydrator::{
    ERROR_PREFIX, client, exit, launcher, leftover, offline, serve, supervisor,
};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    tracing_subscriber::fmt()
        .with_env_filter(
            EnvFilter::try_from_env("LOCALSTOR_LOG").unwrap_or_else(|_| EnvFilter::new("info")),
        )
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    match carry_out(arguments.command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("{ERROR_PREFIX}{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn carry_out(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Run(launch) if launch.detach => match launcher::launch(&launch)? {
            Some(device) => println!("{device}"),
            None => return Ok(ExitCode::from(exit::NOT_YET)),
        },
        Command::Run(launch) => match serve::run(&launch.settings)? {
            End::Removal => {}
            End::Departure => return Ok(ExitCode::from(exit::DEPARTED)),
        },
        Command::Supervise(launch) => {
            return supervisor::supervise(&launch.settings).map(ExitCode::from);
        }
        Command::Status(place) => client::ask(&place.runtime, &Request::Status)?,
        Command::Start(place) => client::ask(&place.runtime, &Request::Start)?,
        Command::Throttle(throttle) => client::ask(
            &throttle.place.runtime,
            &Request::Throttle {
                limit: throttle.limit,
                minimum: throttle.minimum,
            },
        )?,
        Command::Retry(place) => client::ask(&place.runtime, &Request::Retry)?,
        Command::Pause(pause) => client::ask(
            &pause.place.runtime,
            &Request::Pause {
                seconds: pause.seconds,
            },
        )?,
        Command::Resume(place) => client::ask(&place.runtime, &Request::Resume)?,
        Command::Finish(place) => leftover::finish(&place.runtime)?,
        Command::Abort(place) => leftover::abort(&place.runtime)?,
        Command::Dump(disk) => offline::dump(&disk.metadata, &mut std::io::stdout().lock())?,
        Command::Check(disk) => {
            let sound = offline::check(&disk.metadata, &mut std::io::stdout().lock())?;
            if !sound {
                return Ok(ExitCode::from(2));
            }
        }
        Command::Repair(repair) => {
            let output = &mut std::io::stdout().lock();
            if !offline::repair(&repair.disk.metadata, &repair.accept_loss, output)? {
                return Ok(ExitCode::from(2));
            }
        }
        Command::Copy(copy) => {
            offline::copy(&copy.disk.metadata, copy.move_id, &copy.to, copy.new_move)?;
        }
        Command::Man(page) => print_page(page.command.as_deref())?,
    }
    Ok(ExitCode::SUCCESS)
}

fn print_page(name: Option<&str>) -> anyhow::Result<()> {
    let mut command = Arguments::command();
    // Names its subcommands as their pages are called.
    command.build();
    if let Some(name) = name {
        let found = command.find_subcommand(name).cloned();
        command = found.with_context(|| format!("there is no command \"{name}\""))?;
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page)?;
    std::io::stdout().lock().write_all(&page)?;
    Ok(())
}
