// What a program says when it ends because nobody caught an exception.
#pragma once

namespace tessera {

/// Called with the first Error that is made, and by init(). From then on, an Error of Tessera that nobody catches ends the process with
/// status 1 and "PROGRAM: message" on standard error, instead of "terminate called" and a core. Other exceptions go to the handler that the
/// program had. All of them are recorded for the launcher. Only the first call does something.
void say_last_words();

}  // namespace tessera
