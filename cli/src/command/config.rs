//! `config`: the contexts of this user.

use crate::{
    args::Config,
    contexts::{Connection, Context, Contexts},
    failure::{Code, Failure, Result},
    output::{self, table::Table},
};

/// Runs a verb for contexts. Needs no daemon.
pub fn run(what: &Config, given: &Connection) -> Result<()> {
    let mut contexts = Contexts::load()?;
    match what {
        Config::GetContexts => list(&contexts),
        Config::UseContext { name } => {
            contexts.get(name)?;
            contexts.current = Some(name.clone());
            contexts.save()?;
            output::line(format!("context/{name} selected"))
        }
        Config::SetContext { name } => {
            let context = set(contexts.contexts.get(name).cloned().unwrap_or_default(), given)?;
            contexts.contexts.insert(name.clone(), context);
            contexts.save()?;
            output::line(format!("context/{name} set"))
        }
        Config::DeleteContext { name } => {
            contexts.get(name)?;
            contexts.contexts.remove(name);
            contexts.current = contexts.current.filter(|current| current != name);
            contexts.save()?;
            output::line(format!("context/{name} deleted"))
        }
    }
}

/// Makes paths absolute, as the context is for all folders.
fn set(context: Context, given: &Connection) -> Result<Context> {
    if given.context.is_some() {
        let message = "--context is not allowed here: the name of the context follows set-context";
        return Err(Failure::new(Code::Usage, message));
    }
    let mut context = context.with(given);
    let files = [
        &mut context.socket,
        &mut context.ca,
        &mut context.cert,
        &mut context.key,
    ];
    for file in files.into_iter().flatten() {
        *file = std::path::absolute(&*file)
            .map_err(|error| Failure::new(Code::Invalid, format!("{}: {error}", file.display())))?;
    }
    if context.socket.is_none() && context.endpoint.is_none() {
        return Err(Failure::new(
            Code::Usage,
            "a context requires --endpoint or --socket",
        ));
    }
    context.clone().target()?;
    Ok(context)
}

fn list(contexts: &Contexts) -> Result<()> {
    let rows = contexts.contexts.iter().map(|(name, context)| {
        let current = if contexts.current.as_ref() == Some(name) {
            "*"
        } else {
            ""
        };
        let socket = context.socket.as_ref().map(|path| path.display().to_string());
        let address = context.endpoint.clone().or(socket).unwrap_or_default();
        let cert = context.cert.as_ref().map(|path| path.display().to_string());
        vec![
            current.to_owned(),
            name.clone(),
            address,
            cert.unwrap_or_default(),
        ]
    });
    let mut table = Table::new(vec!["CURRENT", "NAME", "DAEMON", "CERTIFICATE"]);
    output::print(&table.whole(&rows.collect::<Vec<_>>(), true))
}
